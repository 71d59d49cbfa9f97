"""Warnings in training: of a fused loss that is multiplied, and of a model set up wrongly."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from hytrain.engine.deepspeed_internals import TiledFusedLogitsLoss
from hytrain.optimizer.layer_hooks import with_gradient

logger = logging.getLogger(__name__)


def warn_of_factors() -> None:
    """Warns once in this process if a ``TiledFusedLogitsLoss`` was multiplied, and by what.

    It computes the gradients of its weights in forward, for the loss as it returns it. A later
    factor (a division by tokens, accumulation, a loss scale) reaches the activations' gradient but
    not those of the weights.
    """
    plain = TiledFusedLogitsLoss.backward

    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        factor = float(gradients[0])  # DeepSpeed compares it as well
        if factor != 1.0:
            _set_backward(plain)
            logger.warning(
                "the loss of DeepSpeed's TiledFusedLogitsLoss was multiplied by %g behind it (by a "
                "division, gradient accumulation or a weight): the gradients of its weights do not "
                "have that factor, with plain DeepSpeed neither, and the training is another one. "
                "Use deepspeed's sequence_tiled_compute, or divide inside of the tiled function",
                factor,
            )
        return plain(context, *gradients)

    if getattr(plain, "__module__", "") != __name__:
        _set_backward(backward)


def _set_backward(function: Any) -> None:
    setattr(TiledFusedLogitsLoss, "backward", staticmethod(function))  # noqa: B010 (its type)


class StepWarnings:
    """Warns of frozen parameters that get gradients, and of checkpointing that does nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Notes the parameters that are frozen when the engine is built."""
        self._model = model
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._has_looked = False

    def after_step(self) -> None:
        """Checks after a step, and gives each warning once."""
        self._warn_of_thawed()
        if not self._model.training and not self._has_looked:
            self._has_looked = True  # through all modules: once
            self._warn_of_eval_mode()

    def _warn_of_eval_mode(self) -> None:
        # transformers' blocks have this attribute, and read it in training mode only.
        modules = self._model.modules()
        if any(getattr(module, "gradient_checkpointing", False) for module in modules):
            logger.warning(
                "the model trains in eval mode, as from_pretrained leaves it: gradient "
                "checkpointing does nothing there, so all activations are kept, and dropout is "
                "off. Call engine.train() before the steps"
            )

    def _warn_of_thawed(self) -> None:
        # Their gradients stay: another optimizer may train them.
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
