"""PyTorch FSDP2 with CPUOffloadPolicy: fp32 weights, gradients and moments live on the host.

It is measured without gradient clipping: a norm of gradients on the host would be one more pass
over all of them before the update, so leaving it out is in this system's favour.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from experiments.common.model import Batch, MakeModel
from experiments.common.records import Job
from experiments.common.systems.base import System, fused_adamw, loss_of


class Fsdp2(System):
    """One rank; every decoder layer is a unit of its own, the rest belongs to the root."""

    def __init__(self, model: torch.nn.Module, job: Job) -> None:
        device = job.workload.device
        self.thread_candidates = tuple(job.entry.options.get("threads", ()))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        shard = functools.partial(
            fully_shard,
            mesh=init_device_mesh(device, (1,)),
            mp_policy=policy,
            # Page-locked memory needs a driver.
            offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda"),
            reshard_after_forward=job.entry.options.get("reshard_after_forward", True),
        )
        for layer in model.get_submodule("model.layers").children():
            shard(layer)
        shard(model)
        self._model = model
        self._optimizer = fused_adamw(model.parameters())

    def step(self, batch: Batch) -> torch.Tensor:
        loss = loss_of(self._model, batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def close(self) -> None:
        dist.destroy_process_group()


def build(make_model: MakeModel, job: Job) -> System:
    """Options: `threads`, the CPU thread counts to try; `reshard_after_forward`."""
    return Fsdp2(make_model(torch.float32), job)
