"""What stands for unequal GPUs on a machine without any: to try the scripts, not to measure.

Speed: every block sleeps in proportion to its samples. Memory: the sizes of the H200 and of the 3 B
model, scaled to the toy, and an error where the device would have run out of memory.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from experiments.common.records import Json
from experiments.unequal_gpus.cases import Case
from hytrain.errors import MemoryBudgetError
from hytrain.formats.profile_file import DeviceProfile, ProfileFile

FORWARD_SECONDS = 0.002
BACKWARD_SECONDS = 0.004
"""Of a sample in a block at speed 1."""

STATE_BYTES, KEPT_BYTES = 14.0, 12.0
"""A parameter, with its gradient and without."""
STATE_GIB = 38.0
"""Of the 3 B model, that the cases are made for."""
GPU_GIB = 139.0
SAMPLE_GIB = 1.45
RECOMPUTED = 0.1
"""Of that, at most at once where it is computed again."""


class _Slow(torch.autograd.Function):
    """Sleeps in forward and in backward, there on the thread that runs it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, speed: float) -> torch.Tensor:
        ctx.speed = speed
        time.sleep(hidden.shape[0] * FORWARD_SECONDS / speed)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        time.sleep(gradient.shape[0] * BACKWARD_SECONDS / ctx.speed)
        return gradient, None


def slow_down(model: torch.nn.Module, speed: float) -> None:
    """From now on every block of the model takes longer."""

    def sleep(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        del module, inputs
        if isinstance(output, tuple):
            return (_Slow.apply(output[0], speed), *output[1:])
        return _Slow.apply(output, speed)

    for block in model.get_submodule("model.layers").children():
        block.register_forward_hook(sleep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """The stand-in's sizes for a model with so many parameters."""

    parameters: int

    @property
    def gib(self) -> float:
        """Bytes that stand for a GiB."""
        return STATE_BYTES * self.parameters / STATE_GIB

    def gpu(self, case: Case, rank: int) -> int:
        """Of a rank's GPU."""
        return int(GPU_GIB * case.memory[rank] * self.gib)

    def instead(self, case: Case, profile: ProfileFile) -> ProfileFile:
        """A profile of CPUs with the memory of the case's GPUs."""
        (host,) = profile.hosts
        rank_of = {label: rank for rank, label in enumerate(host.ranks)}
        layers = profile.model.num_layers

        def device(one: DeviceProfile) -> DeviceProfile:
            memory = self.gpu(case, rank_of[one.label])
            rows = tuple(
                row.model_copy(
                    update={
                        "kept_bytes": self.stored(row.samples) // layers,
                        "peak_bytes": self.stored(row.samples) // layers,
                        "recompute_peak_bytes": int(RECOMPUTED * self.stored(row.samples)),
                    }
                )
                for row in one.layer
            )
            outside = tuple(row.model_copy(update={"peak_bytes": 0}) for row in one.outside)
            sizes = {"limit_bytes": memory, "memory_bytes": memory, "idle_bytes": 0}
            return one.model_copy(update={**sizes, "layer": rows, "outside": outside})

        return profile.model_copy(update={"devices": tuple(map(device, profile.devices))})

    def host(self, case: Case) -> int | None:
        """Of all ranks together; None: what there is."""
        return None if case.host_gib is None else int(case.host_gib * self.gib)

    def stored(self, samples: int) -> int:
        """The activations of a micro-batch."""
        return int(SAMPLE_GIB * samples * self.gib)

    def check(self, case: Case, rank: int, work: Json, gpu_fraction: float | str) -> None:
        """What would happen to a rank of a run.

        Args:
            case: with the memory that there is.
            rank: whose.
            work: batches, micro-batches and shards of all ranks.
            gpu_fraction: of the rank, or "solve".

        Raises:
            torch.OutOfMemoryError: a fixed placement does not fit this rank.
            MemoryBudgetError: there is none that fits some rank, where it may be solved.
        """
        if isinstance(gpu_fraction, str):
            for each in range(case.num_ranks):
                self._check_solved(case, each, work)
            return
        needed = self._needed(work, rank, gpu_fraction)
        if needed > self.gpu(case, rank):
            raise torch.OutOfMemoryError(f"simulated: {needed} of {self.gpu(case, rank)} bytes")

    def _check_solved(self, case: Case, rank: int, work: Json) -> None:
        shard = self._fraction(work, rank) * STATE_BYTES * self.parameters
        free = self.gpu(case, rank) - self._needed(work, rank, 0.0)
        host = self.host(case)
        if host is not None and free + host / case.num_ranks < shard:
            raise MemoryBudgetError(f"simulated: rank {rank} has no memory for {shard:.0f} bytes")

    def _fraction(self, work: Json, rank: int) -> float:
        fractions = work["shard_fractions"]
        return fractions[rank] if fractions else 1.0 / len(work["batch_sizes"])

    def _needed(self, work: Json, rank: int, gpu_fraction: float) -> float:
        here = self.parameters * self._fraction(work, rank) * gpu_fraction
        batch, size = work["batch_sizes"][rank], work["micro_batch_sizes"][rank]
        # Activations that are computed again are there for one layer at a time.
        part = 1.0 if work["activations"][rank] == "store" else RECOMPUTED
        whole = 2 * self.parameters if batch else 0  # who computes nothing has no gradients
        # The reduced gradients of what is updated here come when activations have gone.
        first, next_ones = min(size, batch), min(size, batch - size)
        most = max(whole, (STATE_BYTES - KEPT_BYTES) * here, part * self.stored(first))
        if batch > size:
            most = max(most, whole + part * self.stored(next_ones))
        return 2 * self.parameters + most + KEPT_BYTES * here
