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
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._names, self._parameters = list(frozen), list(frozen.values())

    def warn(self) -> None:
        """Once of each parameter; gradients stay: another optimizer may train it."""
        found = set(with_gradient(self._parameters))
        if not found:
            return
        names = [self._names[index] for index in sorted(found)]
        logger.warning(
            "%d parameters (%s, ...) were frozen when the engine was built and have gradients now: "
            "the engine does not train them, and their .grad adds up. Build the engine with them "
            "(requires_grad=True), freezing them after it if need be",
            len(names),
            names[0],
        )
        kept = [index for index in range(len(self._names)) if index not in found]
        self._names = [self._names[index] for index in kept]
        self._parameters = [self._parameters[index] for index in kept]
