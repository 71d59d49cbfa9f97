"""A warning of DeepSpeed's ``TiledFusedLogitsLoss`` where its result is multiplied.

It makes the gradients of its weights in forward, of the loss as it returns it. What the loss is
multiplied by behind it (a division by tokens, accumulation, a loss scale) reaches the activations'
gradient and not those of the weights.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hytrain.engine.deepspeed_internals import TiledFusedLogitsLoss

logger = logging.getLogger(__name__)


def warn_of_factors() -> None:
    """Says once in this process that such a loss was multiplied, and by what."""
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
