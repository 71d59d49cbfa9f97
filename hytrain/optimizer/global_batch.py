"""A rank's share of a global batch, and how its loss counts in the global mean.

The mean is over the valid tokens of the global batch, as on one GPU that computes all of it: each
micro-batch's loss is weighted by its share of them, and gradients are summed over micro-batches and
ranks. A rank may have more micro-batches than another, or none: gradients are reduced once a step,
in the last one's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hytrain.errors import UnsupportedError

IGNORED_LABEL = -100
"""torch's cross entropy and transformers leave tokens with this label out of the mean."""

LABELS, SHIFTED_LABELS = "labels", "shift_labels"

NumValid = Callable[[Any], "int | torch.Tensor"]


class BatchEngine(Protocol):
    """What a step over a global batch needs of an engine."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> Any: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None: ...
    def watching_reads(self) -> AbstractContextManager[None]: ...
    def autocasting(self) -> AbstractContextManager[None]: ...
    def give_up_forward(self) -> None: ...


def valid_labels(batch: Any) -> torch.Tensor:
    """The number of valid tokens of a causal language model's batch: ``labels[:, 1:] != -100``.

    Parts of a sequence have ``shift_labels``, which begin with the first token's next one: of these
    no column is left out.

    Raises:
        UnsupportedError: the batch has neither; ``labels`` need the shape [samples, tokens].
    """
    found: dict[str, Any] = dict(batch) if isinstance(batch, Mapping) else {}
    shifted, labels = found.get(SHIFTED_LABELS), found.get(LABELS)
    if isinstance(shifted, torch.Tensor):
        return (shifted != IGNORED_LABEL).sum()
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2:
        raise UnsupportedError(
            "train_batch cannot tell over how many tokens the loss is a mean: the batch has no "
            '"labels" of shape [samples, tokens]; pass num_valid=function, which takes a '
            "micro-batch and returns the number of terms of its mean"
        )
    return (labels[:, 1:] != IGNORED_LABEL).sum()


def loss_of(output: Any) -> torch.Tensor:
    """The loss in a model's output: itself, ``.loss``, ``["loss"]`` or the first item.

    Raises:
        UnsupportedError: there is no scalar tensor.
    """
    if isinstance(output, Mapping):
        found: Any = output.get("loss")
    elif isinstance(output, (tuple, list)):
        found = output[0] if output else None
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise UnsupportedError(
            f"the model's forward returned {type(output).__name__} without a scalar loss: return "
            "the loss, a tuple that begins with it, or an object with .loss"
        )
    return found


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """A rank's share of a step.

    Attributes:
        batches: what the model takes: mappings by name, anything else by position.
        weights: the weight of each one's loss in the global batch's mean; float64, on the device.
        device: the losses' device.
        absent: how many micro-batches other ranks have more, in whose gathers every rank takes
            part (ZeRO-3).
    """

    batches: Sequence[Any]
    weights: Sequence[torch.Tensor]
    device: torch.device
    absent: int = 0

    def forward(self, number: int, model: Callable[..., Any]) -> Any:
        """The model's output for one of them."""
        batch = self.batches[number]
        if not isinstance(batch, Mapping):
            return model(*batch)
        if SHIFTED_LABELS in batch and LABELS not in batch:
            # Models of transformers compute a loss if there are labels, from the shifted ones.
            batch = {**batch, LABELS: batch[SHIFTED_LABELS]}
        return model(**batch)

    def mean(self) -> torch.Tensor:
        """A new sum of losses, zero, for :meth:`weigh` to add to."""
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def weigh(self, number: int, output: Any, mean: torch.Tensor) -> torch.Tensor:
        """The loss for backward, 0-dimensional; adds its part of the global mean to ``mean``."""
        loss = loss_of(output).reshape(())
        weight = self.weights[number]
        part = loss.detach().double() * weight
        # A micro-batch without a valid token has no mean (0/0), and no part in the global one.
        mean += torch.where(weight > 0, part, torch.zeros_like(part))
        return loss * weight.to(loss.dtype)
