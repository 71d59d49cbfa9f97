"""Everything on the GPU: bf16 weights for the passes, fp32 master weights, fused AdamW."""

from __future__ import annotations

import torch

from experiments.common.model import Batch, MakeModel
from experiments.common.records import Job, Json
from experiments.common.systems.base import System, fused_adamw, loss_of


class AllGpu(System):
    """Mixed precision as it is usually written where the memory is there."""

    def __init__(self, model: torch.nn.Module, clip: float | None) -> None:
        self._model = model
        self._clip = clip
        self._weights = list(model.parameters())
        self._masters = [w.detach().float().requires_grad_() for w in self._weights]
        self._optimizer = fused_adamw(self._masters)
        self._norms: list[torch.Tensor] = []

    def step(self, batch: Batch) -> torch.Tensor:
        loss = loss_of(self._model, batch)
        loss.backward()
        for weight, master in zip(self._weights, self._masters, strict=True):
            # The fused kernel refuses bf16 gradients beside fp32 state, and the norm is taken in
            # fp32. Every weight of this model has a gradient.
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        if self._clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self._masters, self._clip, foreach=True)
            self._norms.append(norm.detach())
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)
        return loss.detach()

    def summary(self) -> Json:
        return {"grad_norms": [float(norm) for norm in self._norms]}


def build(make_model: MakeModel, job: Job) -> System:
    """Takes no options."""
    return AllGpu(make_model(torch.bfloat16), job.entry.clip)
