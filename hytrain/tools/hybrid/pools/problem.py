"""What is given (pools of GPUs, profiles, bandwidth curves) and what is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hytrain.errors import PlanError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Pool:
    """Equal GPUs of one zone."""

    device: str
    """The GPUs' type, as the profiles name it."""
    zone: str
    gpus: int
    memory_bytes: float
    """Of each GPU."""
    node_gpus: int
    """Of a node; a tensor parallel group stays within one."""


@dataclass(frozen=True)
class Times:
    """A profile: seconds of every layer for one micro-batch."""

    forward: tuple[float, ...]
    compute: tuple[float, ...]
    """Forward and backward."""
    update: tuple[float, ...]
    """The optimizer's step, as measured for a stage that begins with this layer."""


@dataclass(frozen=True)
class Memory:
    """Elements of every layer on each GPU at one tensor parallel degree."""

    parameters: tuple[float, ...]
    activations: tuple[float, ...]
    """Kept from forward to backward, of one sample."""


Profiles = Mapping[tuple[str, int, int], Times]
"""By (type, tp, samples of a micro-batch)."""

End = tuple[int, int]
"""One side of a transfer: pool, and GPUs that send or receive together."""


@dataclass(frozen=True)
class Problem:
    """Everything that a plan's cost depends on."""

    pools: tuple[Pool, ...]
    profiles: Profiles
    memory: Mapping[int, Memory]
    """By tensor parallel degree."""
    activation_bytes: tuple[float, ...]
    """What each layer hands to the next, of one sample."""
    parameter_bytes: tuple[float, ...]
    """Of every layer's gradient, whole."""
    curves: Mapping[tuple[str, str, int, str, str, int], tuple[float, ...]]
    """(type, zone, GPUs) of the sender, then of the receiver -> polynomial of GB/s in log2(MB)."""
    batch: int
    """Samples of a step."""
    bytes_per_parameter: float = 24.0
    """Weights, gradients and optimizer state, with what DeepSpeed copies and communicates."""
    bytes_per_activation: float = 4.0
    reserved_bytes: tuple[float, float] = (2e9, 3e9)
    """Of each GPU beside the model: without, with tensor parallelism."""
    bucket_bytes: float = 5e8
    """Gradients are reduced in buckets of this size."""

    def __post_init__(self) -> None:
        """Refuse what no plan can be made of.

        Raises:
            PlanError: no pool, a pool without GPUs or profile, or tables of unequal length.
        """
        if not self.pools:
            raise PlanError("no pool of GPUs is given")
        devices = {device for device, _, _ in self.profiles}
        for pool in self.pools:
            if pool.gpus < 1:
                raise PlanError(f"pool {pool.device} in {pool.zone}: must have a GPU or more")
            if pool.device not in devices:
                raise PlanError(f"pool {pool.device} in {pool.zone}: there is no profile of it")
        if self.batch < 1:
            raise PlanError(f"the batch must be 1 or more, not {self.batch}")
        layers = self.num_layers
        tables = [self.parameter_bytes]
        tables += [one for times in self.profiles.values() for one in vars(times).values()]
        tables += [one for m in self.memory.values() for one in (m.parameters, m.activations)]
        if any(len(table) != layers for table in tables):
            raise PlanError(f"every table must have {layers} layers, as the activations have")

    @property
    def num_layers(self) -> int:
        return len(self.activation_bytes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples of a micro-batch that some profile has."""
        return tuple(sorted({samples for _, _, samples in self.profiles}))


@dataclass(frozen=True, order=True)
class Replicas:
    """So many equal data-parallel replicas of a stage."""

    pool: int
    tp: int
    count: int


@dataclass(frozen=True)
class Stage:
    """Layers ``start`` to ``stop``, and who runs them."""

    start: int
    stop: int
    replicas: tuple[Replicas, ...]
    """In rank order; replica j of a stage sends to replica j of the next."""

    @property
    def dp(self) -> int:
        return sum(one.count for one in self.replicas)


@dataclass(frozen=True)
class Plan:
    """A pipeline; every stage has as many replicas."""

    stages: tuple[Stage, ...]
    micro_batch: int
    """Samples that a replica runs at once."""

    @property
    def dp(self) -> int:
        return self.stages[0].dp

    def used(self, num_pools: int) -> tuple[int, ...]:
        """GPUs of each pool."""
        gpus = [0] * num_pools
        for stage in self.stages:
            for one in stage.replicas:
                gpus[one.pool] += one.count * one.tp
        return tuple(gpus)
