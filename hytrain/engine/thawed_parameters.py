"""Parameters that were frozen when the engine was built, and want gradients since."""

from __future__ import annotations

import logging

from torch import nn

from hytrain.optimizer.layer_hooks import with_gradient

logger = logging.getLogger(__name__)


class ThawedParameters:
    """Warns of frozen parameters that get gradients: there is no state to train them with."""

    def __init__(self, model: nn.Module) -> None:
        """When the engine is built."""
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}

    def warn(self) -> None:
        """Once of each parameter; gradients stay: another optimizer may train it."""
        found = with_gradient(list(self._frozen.values()))
        if not found:
            return
        names = [name for index, name in enumerate(self._frozen) if index in found]
        logger.warning(
            "%d parameters (%s, ...) were frozen when the engine was built and have gradients now: "
            "the engine does not train them, and their .grad adds up. Build the engine with them "
            "(requires_grad=True), freezing them after it if need be",
            len(names),
            names[0],
        )
        for name in names:
            del self._frozen[name]
