"""Cephalo's problem (Guo et al., "Cephalo: Harnessing Heterogeneous GPU Clusters for Training
Transformer Models"): one sharded-data-parallel job over GPUs that differ in speed and memory.

Per transformer layer, with micro-batches of m samples and l = ceil(b / m) of them for b samples::

    forward   F = max(AG, l f(m))
    backward  B = max(AG + RS, l f(m) + l g(m) + (l - 1) * accumulation)     recompute charged
    minimise max_i (F_i + B_i)  subject to  sum b_i = batch, b_i >= 1,
        C(m_i) <= 0.75 capacity_i,  sum C(m_i) + 16 B * parameters < 0.75 * sum capacity_i

All l micro-batches are charged at full size. AG and RS are times 1.25 for a GPU whose C(m) leaves
no room for an even shard of the state. Times in ms, memory in GiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hytrain.errors import PlanError

_GIB = 1024**3
_STATE_BYTES = 16
"""A parameter, of sharded state."""

_UNEVEN_FACTOR = 1.25
"""What unequal shards cost in collectives."""


@dataclass(frozen=True, slots=True)
class UnevenGpu:
    """One GPU. GPUs that compare equal are one type, whose options are listed once.

    Attributes:
        name: its type's.
        forward: one layer's forward with micro-batches of 1, 2, ... samples up to the batch, ms.
        backward: one layer's backward, without recompute, likewise.
        memory: C, the peak of everything but the sharded state, likewise, GiB.
        capacity: its memory, GiB.
    """

    name: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    memory: tuple[float, ...]
    capacity: float


@dataclass(frozen=True, slots=True)
class UnevenProblem:
    """A batch to be dealt to GPUs.

    Attributes:
        gpus: one entry a GPU.
        batch: samples of the global batch.
        parameters: of the model.
        all_gather: AG of one evenly sharded layer, ms.
        reduce_scatter: RS of one evenly sharded layer, ms.
        accumulation: what each further micro-batch adds to a layer's backward, ms.
        usable: share of a GPU's memory that may be used.

    Raises:
        PlanError: no GPU, or a number out of its range.
    """

    gpus: tuple[UnevenGpu, ...]
    batch: int
    parameters: int
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    accumulation: float = 10.0
    usable: float = 0.75

    def __post_init__(self) -> None:
        if not self.gpus:
            raise PlanError("a plan needs at least one GPU")
        if self.batch < 1 or self.parameters < 1:
            raise PlanError(
                f"a batch of {self.batch} samples, {self.parameters} parameters: both must be "
                "positive"
            )
        for name in ("all_gather", "reduce_scatter", "accumulation"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} must not be negative, got {getattr(self, name)}")
        for gpu in dict.fromkeys(self.gpus):
            profile = np.array([gpu.forward, gpu.backward, gpu.memory])
            if not (np.isfinite(profile) & (profile >= 0.0)).all():
                raise PlanError(f"{gpu.name}: a time or memory is negative or not finite")

    @property
    def state(self) -> float:
        """GiB of sharded state, all ranks together."""
        return _STATE_BYTES * self.parameters / _GIB

    @property
    def budget(self) -> float:
        """GiB that the C of all GPUs together must stay below."""
        return self.usable * sum(gpu.capacity for gpu in self.gpus) - self.state


def layer_time(problem: UnevenProblem, gpu: UnevenGpu, size: Any, number: Any) -> Any:
    """F + B of one layer on one GPU, ms; of whole numbers, or of arrays of one shape.

    ``gpu``: whose time; ``size``: of a micro-batch, at least 1.
    """
    profile = np.array([gpu.forward, gpu.backward, gpu.memory])
    forward, backward, memory = profile[:, np.asarray(size) - 1]
    room = problem.usable * gpu.capacity - problem.state / len(problem.gpus)
    factor = np.where(memory > room, _UNEVEN_FACTOR, 1.0)
    gather, scatter = problem.all_gather * factor, problem.reduce_scatter * factor
    again = number * backward + (number - 1) * problem.accumulation
    forward = number * forward
    return np.maximum(gather, forward) + np.maximum(gather + scatter, forward + again)
