"""The protocol of a measured system, and the hyper-parameters that all of them share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable

import torch

from experiments.common.model import Batch, MakeModel
from experiments.common.records import Job, Json

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01

OPTIMIZER: Json = {
    "type": "AdamW",
    "params": {
        "lr": LEARNING_RATE,
        "betas": list(BETAS),
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
    },
}
"""The "optimizer" section of a DeepSpeed JSON."""


def fused_adamw(parameters: Iterable[torch.nn.Parameter] | list[torch.Tensor]) -> torch.optim.AdamW:
    """torch's fused AdamW, on whatever device the parameters are."""
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
    )


class System(abc.ABC):
    """A model with its optimizer, ready to train."""

    thread_candidates: tuple[int, ...] = ()
    """CPU thread counts to try for the update; the fastest is kept. Empty: the system decides."""

    @abc.abstractmethod
    def step(self, batch: Batch) -> torch.Tensor:
        """Forward, backward and update; returns the detached loss without waiting for it."""

    def observe(self) -> Json | None:
        """The numbers of the newest step, with its number under "step"; must not wait."""
        return None

    def drain(self) -> None:
        """Finish whatever the last step left in flight; most systems leave nothing."""
        return

    def summary(self) -> Json:
        """Numbers for the record, read after the timing; may wait."""
        return {}

    def close(self) -> None:
        """Give everything back; what belongs to the process alone needs no closing."""
        return


Build = Callable[[MakeModel, Job], System]
"""Builds a system from the function that makes the model in a given dtype, and its job."""


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The loss, computed by the model itself, in the same way for every system."""
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
