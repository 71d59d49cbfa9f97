"""What a plan costs: pure functions of a problem and a plan.

The published model (Metis, USENIX ATC 2024, and its code) for a step of B micro-batches in S stages::

    (B-1)*max t_s + sum t_s + B*fb_sync(last) + max update_s + max gradients_s
        + sum activations_s + B*batch_generator

Whatever takes ``start`` and ``stop`` (layers of a stage) takes whole numbers or arrays of them that
broadcast, so that the search makes its tables with the same functions (:mod:`.stage_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.hybrid import host_update
from hytrain.tools.hybrid.problem import Floats, Plan, Problem

BANDWIDTH_UNIT = 2.0**20
"""Bytes a millisecond of 1 GB/s, in the published model."""

NOTHING_MB = 0.001


class NotProfiledError(PlanError):
    """A stage runs at a (tp, micro-batch size) that its profile does not have."""


# -- the samples of a stage --------------------------------------------------------------------


@dataclass(frozen=True)
class Replicas:
    """Equal data-parallel replicas of a stage."""

    types: tuple[str, ...]
    """Distinct, that the replica is as slow as; its GPUs' types, or only its first one's."""

    samples: int
    """Of a micro-batch, of each."""

    count: int = 1


def proportional_split(
    problem: Problem, types: Sequence[str], dp: int, tp: int, samples: int
) -> tuple[int, ...]:
    """Samples of each replica, in proportion to its speed with one sample.

    What is left by rounding down goes one each to the largest remainders, of equal ones the first.

    Args:
        problem: with the profiles.
        types: of the stage's GPUs; each replica has ``len(types) // dp`` neighbours.
        dp: replicas.
        tp: tensor parallel degree whose profile has the speeds.
        samples: of a micro-batch, all replicas together.

    Raises:
        NotProfiledError: a replica's type has no profile with one sample.
    """
    size = len(types) // dp
    groups = [_charged(problem, types[rank * size : (rank + 1) * size]) for rank in range(dp)]
    speeds = [
        1.0 / max(float(_sums(problem.time_sums, device, tp, 1)[-1]) for device in group)
        for group in groups
    ]
    total = sum(speeds)
    exact = [samples * (speed / total) for speed in speeds]
    split = [int(value) for value in exact]
    by_rest = sorted(range(dp), key=lambda i: exact[i] - split[i], reverse=True)
    for i in by_rest[: samples - sum(split)]:
        split[i] += 1
    return tuple(split)


def stage_replicas(
    problem: Problem, types: Sequence[str], dp: int, tp: int, samples: int
) -> list[Replicas]:
    """The replicas of a stage, equal neighbours together; see :func:`proportional_split`."""
    split: Sequence[int] = (
        [samples // dp] * dp
        if len(set(types)) == 1
        else proportional_split(problem, types, dp, tp, samples)
    )
    found = [
        (_charged(problem, types[rank * tp : (rank + 1) * tp]), share)
        for rank, share in enumerate(split)
    ]
    return [Replicas(*key, len(list(same))) for key, same in groupby(found)]


def _charged(problem: Problem, types: Sequence[str]) -> tuple[str, ...]:
    return (types[0],) if problem.options.tp_speed == "first" else tuple(sorted(set(types)))


def micro_batch_slices(samples: int) -> list[int]:
    """The sizes in which a replica runs its samples: their binary digits.

    >>> micro_batch_slices(11)
    [8, 2, 1]
    """
    return [1 << bit for bit in reversed(range(samples.bit_length())) if samples >> bit & 1]


def _sums(table: dict[tuple[str, int, int], Floats], device: str, tp: int, samples: int) -> Floats:
    try:
        return table[device, tp, samples]
    except KeyError:
        raise NotProfiledError(
            f"there is no profile of {device} at tp {tp} and micro-batch size {samples}"
        ) from None


def replica_sums(
    table: dict[tuple[str, int, int], Floats], device: str, tp: int, samples: int, *, whole: bool
) -> Floats:
    """Of a replica, a table's values (times, memory) of the layers below each.

    Args:
        table: ``Problem.time_sums`` or ``Problem.memory_sums``.
        device: the replica's type.
        tp: its degree.
        samples: of a micro-batch.
        whole: the samples run at once (a stage of equal GPUs), not as their binary digits.

    Raises:
        NotProfiledError: a size is not in the profile.
    """
    if whole:
        return _sums(table, device, tp, samples)
    slices = [_sums(table, device, tp, size) for size in micro_batch_slices(samples)]
    return np.sum(slices, axis=0) if slices else np.zeros_like(next(iter(table.values())))


# -- parts of the cost -------------------------------------------------------------------------


def stage_time(
    problem: Problem, replicas: Sequence[Replicas], tp: int, start: Any, stop: Any, *, whole: bool
) -> Any:
    """Forward and backward of one micro-batch, ms: of the slowest replica."""
    slowest: Any = 0.0
    for one in replicas:
        for device in one.types:
            sums = replica_sums(problem.time_sums, device, tp, one.samples, whole=whole)
            slowest = np.maximum(slowest, sums[stop] - sums[start])
    return slowest


def fb_sync(problem: Problem, types: Sequence[str], tp: int, samples: int) -> float:
    """What one micro-batch takes beyond its layers, ms; ``samples`` of each replica, if even.

    Raises:
        NotProfiledError: a type has no such profile.
    """
    found = [problem.samples.get((device, tp, samples)) for device in set(types)]
    if None in found:
        raise NotProfiledError(f"no profile of {set(types)} at tp {tp}, micro-batch {samples}")
    return max(one.fb_sync for one in found if one is not None)


def update_time(problem: Problem, tp: int, layers: Any) -> Any:
    """The optimizer's, on the GPU, ms."""
    return problem.constants.optimizer_ms / tp * (layers / problem.num_layers)


def gradient_time(
    problem: Problem, dp: int, tp: int, bandwidth: float, start: Any, stop: Any
) -> Any:
    """All-reduce of a stage's gradients between its replicas, ms."""
    volume = (problem.parameter_sums[stop] - problem.parameter_sums[start]) / tp
    return 2 * (dp - 1) / (dp * bandwidth * BANDWIDTH_UNIT) * volume


def activation_bytes(problem: Problem, tp: int, samples: int, stop: Any) -> Any:
    """What a stage sends on, by the published count: logits, where only the head is left."""
    width = np.where(
        np.asarray(stop) == problem.num_layers - 1,
        problem.vocab_size / tp,
        problem.hidden_size,
    )
    return samples * problem.sequence_length * width


# -- bandwidth ---------------------------------------------------------------------------------

Ranks = Sequence[tuple[str, int]]


def bandwidth(problem: Problem, ranks: Ranks) -> float:
    """GB/s between some GPUs, each a (device type, node).

    Published: the least intra-node bandwidth of the nodes, wherever the GPUs are.
    """
    devices = [problem.device[device] for device in sorted({device for device, _ in ranks})]
    if problem.options.inter_node and len({node for _, node in ranks}) > 1:
        return min(device.inter_bandwidth for device in devices)
    return min(device.intra_bandwidth for device in devices)


# -- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """What a stage needs and has, MB: of the group, or of its tightest GPU."""

    demand: Any
    capacity: float


def stage_memory(
    problem: Problem, cluster: Ranks, first: int, dp: int, tp: int, samples: int, start: Any, stop: Any
) -> Memory:
    """Demand and capacity of a stage.

    As published, of the group's sum: one replica's demand where the GPUs are equal, else all
    replicas' (of the slices that each runs), the samples dealt as if the whole cluster were the
    stage. With ``per_gpu_memory`` each GPU's own, of the tightest.

    Args:
        problem: with the profiles.
        cluster: all ranks in the plan's order.
        first: the stage's first rank.
        dp: its replicas.
        tp: their degree.
        samples: of a micro-batch, all replicas together.
        start: first layer.
        stop: layer after the last one.
    """
    types = [device for device, _ in cluster[first : first + dp * tp]]
    if problem.options.per_gpu_memory:
        return _tightest_gpu(problem, types, dp, tp, samples, start, stop)
    whole = len(set(types)) == 1
    parts = [(types[0], samples // dp)]
    if not whole:
        everyone = [device for device, _ in cluster]
        split = proportional_split(problem, everyone, dp, tp, samples)
        parts = [(everyone[i * (len(everyone) // dp)], share) for i, share in enumerate(split)]
    needed: Any = NOTHING_MB
    for device, share in parts:
        sums = replica_sums(problem.memory_sums, device, tp, share, whole=whole)
        needed = needed + problem.mem_coef * (sums[stop] - sums[start])
    return Memory(needed, sum(problem.device[device].memory_mb for device in types))


def _tightest_gpu(
    problem: Problem, types: Sequence[str], dp: int, tp: int, samples: int, start: Any, stop: Any
) -> Memory:
    whole = len(set(types)) == 1
    split = [samples // dp] * dp if whole else proportional_split(problem, types, dp, tp, samples)
    needed: Any = 0.0
    least = min(problem.device[device].memory_mb for device in types)
    for device, share in sorted({(types[rank], split[rank // tp]) for rank in range(len(types))}):
        sums = replica_sums(problem.memory_sums, device, tp, share, whole=whole)
        demand = NOTHING_MB + problem.mem_coef * (sums[stop] - sums[start])
        # In units of the group's smallest memory, so that one number says which GPU is tightest.
        needed = np.maximum(needed, demand * (least / problem.device[device].memory_mb))
    return Memory(needed, least)


# -- stages and plans --------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """What one stage adds to a plan's cost; numbers, or arrays over (start, stop)."""

    time: Any
    """Of a micro-batch, ms."""

    update: Any
    """Of the optimizer, ms."""

    gradients: Any
    """All-reduce, ms."""

    fb_sync: float
    """Of a micro-batch, ms; counted in the last stage."""

    activation: Any
    """Bytes that a micro-batch sends on; counted in all stages but the last."""

    memory: Memory


def stage(
    problem: Problem,
    cluster: Ranks,
    first: int,
    strategy: tuple[int, int],
    micro_batches: int,
    start: Any,
    stop: Any,
    *,
    on_host: bool = False,
) -> Stage:
    """One stage of a plan.

    Args:
        problem: with the profiles.
        cluster: all ranks in the plan's order of types (``Problem.ranks``).
        first: the stage's first rank.
        strategy: (data parallel, tensor parallel) degree.
        micro_batches: of a step.
        start: its first layer, or an array of such.
        stop: the layer after its last one, likewise.
        on_host: whether its optimizer state is in host memory.

    Raises:
        NotProfiledError: a (tp, micro-batch size) that it runs at was not profiled.
        PlanError: the batch cannot be dealt in this way.
    """
    dp, tp = strategy
    ranks = cluster[first : first + dp * tp]
    types = [device for device, _ in ranks]
    samples = problem.gbs // micro_batches
    share = samples // dp
    is_even = len(set(types)) == 1
    if share == 0 or problem.gbs % micro_batches or (is_even and samples % dp):
        raise PlanError(f"{problem.gbs} samples in {micro_batches} micro-batches on {dp} replicas")
    if share > problem.max_batch or tp > problem.max_tp:
        raise NotProfiledError(f"tp {tp}, micro-batch {share} is beyond the profile")
    replicas = stage_replicas(problem, types, dp, tp, samples)
    time = stage_time(problem, replicas, tp, start, stop, whole=is_even)
    memory = stage_memory(problem, cluster, first, dp, tp, samples, start, stop)
    update = update_time(problem, tp, stop - start)
    if on_host:
        update, memory = host_update.offloaded(problem, ranks, time, memory, start, stop)
    return Stage(
        time=time,
        update=update,
        gradients=gradient_time(problem, dp, tp, bandwidth(problem, ranks), start, stop),
        fb_sync=fb_sync(problem, types, tp, share),
        activation=activation_bytes(problem, tp, share, stop),
        memory=memory,
    )


@dataclass(frozen=True)
class PlanCost:
    """A plan's cost and what it is made of, ms."""

    total: float
    stages: tuple[Stage, ...]
    sends: tuple[float, ...]
    """Activations from each stage to the next."""

    @property
    def fits(self) -> bool:
        """Whether every stage's memory suffices."""
        return all(one.memory.demand <= one.memory.capacity for one in self.stages)


def plan_cost(problem: Problem, plan: Plan) -> PlanCost:
    """The cost of a plan, whether it fits or not.

    Raises:
        PlanError: the plan cannot be run on these GPUs, or was not profiled.
    """
    cluster = problem.ranks(plan.order)
    check_plan(problem, plan, len(cluster))
    ends = np.cumsum(plan.groups).tolist()
    stages = tuple(
        stage(
            problem,
            cluster,
            end - group,
            plan.strategies[index],
            plan.micro_batches,
            plan.partition[index],
            plan.partition[index + 1],
            on_host=plan.offloads(index),
        )
        for index, (end, group) in enumerate(zip(ends, plan.groups, strict=True))
    )
    sends: list[float] = []
    for index, one in enumerate(stages[:-1]):
        both = cluster[ends[index] - plan.groups[index] : ends[index + 1]]
        sends.append(float(one.activation) / (bandwidth(problem, both) * BANDWIDTH_UNIT))
    times = [float(one.time) for one in stages]
    total = (
        (plan.micro_batches - 1) * max(times)
        + sum(times)
        + stages[-1].fb_sync * plan.micro_batches
        + max(float(one.update) for one in stages)
        + max(float(one.gradients) for one in stages)
        + sum(sends)
        + problem.constants.batch_generator_ms * plan.micro_batches
    )
    return PlanCost(total, stages, tuple(sends))


def check_plan(problem: Problem, plan: Plan, num_gpus: int) -> None:
    """Raises PlanError where the plan is none of this problem's."""
    layers = list(plan.partition)
    if sorted(plan.order) != [device.name for device in problem.devices]:
        raise PlanError(f"order {plan.order}: not the types of the cluster, each once")
    if sum(plan.groups) != num_gpus or len(plan.strategies) != plan.stages:
        raise PlanError(f"groups {plan.groups}: not {num_gpus} GPUs with a strategy for each group")
    if any(dp * tp != n for (dp, tp), n in zip(plan.strategies, plan.groups, strict=True)):
        raise PlanError(f"strategies {plan.strategies} do not multiply to the groups {plan.groups}")
    if (
        [layers[0], layers[-1], len(layers)] != [0, problem.num_layers, plan.stages + 1]
        or sorted(set(layers)) != layers
    ):
        raise PlanError(
            f"partition {plan.partition}: not all {problem.num_layers} layers, at least one a stage"
        )
