"""The limit: forward and backward only, no update."""

from __future__ import annotations

import torch

from experiments.common.model import Batch, MakeModel
from experiments.common.records import Job
from experiments.common.systems.base import System, loss_of


class ForwardBackward(System):
    """Gradients are computed and dropped."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def step(self, batch: Batch) -> torch.Tensor:
        loss = loss_of(self._model, batch)
        loss.backward()
        for parameter in self._model.parameters():
            parameter.grad = None
        return loss.detach()


def build(make_model: MakeModel, job: Job) -> System:
    """Takes no options."""
    return ForwardBackward(make_model(torch.bfloat16))
