"""What a plan costs: pure functions of a problem and a plan, in seconds and bytes.

The model of Sailor's simulator (SOSP 2025), of M = ceil(batch / (micro-batch * dp))::

    (M-1)*max_s (compute_s + transfer_s) + sum_s (compute_s + transfer_s)
        + max_s update_s + max_s reduce_s

Replicas of a stage may have different types of GPU and tensor parallel degrees; it is as slow as
its slowest. The last micro-batch may be smaller, and counts as a whole one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.hybrid.pools.problem import End, Plan, Problem, Replicas, Stage, Times

MOST_SPLIT = 4
"""A stage's gradients are reduced in shares of at most this many tensor parallel GPUs."""


def seconds_of_bytes(size: Any, curve: Sequence[float]) -> Any:
    """Time of a transfer over a link whose GB/s is a polynomial in log2 of its megabytes.

    Returns:
        As ``size`` (a number or an array); infinite where the fitted curve is not above 0.
    """
    if isinstance(size, float) and size > 0:
        # As below; this one is called for every link of every plan that is costed.
        bandwidth, power = 0.0, math.log2(size / 1e6)
        for coefficient in curve:
            bandwidth = bandwidth * power + coefficient
        return size / 1e9 / bandwidth if bandwidth > 0 else math.inf
    bandwidth = np.polyval(np.asarray(curve), np.log2(np.asarray(size, dtype=float) / 1e6))
    with np.errstate(divide="ignore"):
        return np.where(bandwidth > 0, np.asarray(size) / 1e9 / bandwidth, math.inf)


def curve_between(problem: Problem, sender: End, receiver: End) -> tuple[float, ...]:
    """The bandwidth curve of a link.

    Raises:
        PlanError: it was not measured.
    """
    one, other = problem.pools[sender[0]], problem.pools[receiver[0]]
    key = (one.device, one.zone, sender[1], other.device, other.zone, receiver[1])
    try:
        return problem.curves[key]
    except KeyError:
        raise PlanError(
            f"no bandwidth curve from {sender[1]} {one.device} in {one.zone} to {receiver[1]} "
            f"{other.device} in {other.zone}"
        ) from None


def reduce_seconds(problem: Problem, size: Any, dp: int, curve: Sequence[float]) -> Any:
    """A ring all-reduce of a stage's gradients, bucket after bucket.

    Args:
        problem: for the bucket's size.
        size: bytes of a replica's gradients, a number or an array.
        dp: replicas.
        curve: of the slowest link.
    """
    sizes = np.asarray(size, dtype=float)
    if dp == 1:
        return np.zeros_like(sizes)
    bucket = problem.bucket_bytes
    full = np.ceil(sizes / bucket) - 1
    rest = sizes - full * bucket
    whole = seconds_of_bytes(bucket / dp, curve)
    return (
        2 * (dp - 1) * (np.where(full > 0, full * whole, 0.0) + seconds_of_bytes(rest / dp, curve))
    )


def micro_batches(problem: Problem, plan: Plan) -> int:
    """Of a step."""
    return math.ceil(problem.batch / (plan.micro_batch * plan.dp))


def compute_seconds(problem: Problem, stage: Stage, micro_batch: int) -> float:
    """Forward and backward of one micro-batch, of the slowest replica.

    Raises:
        PlanError: a replica's (type, tp, micro-batch size) is not in the profiles.
    """
    tables = [times_of(problem, one, micro_batch).compute for one in stage.replicas]
    return max(sum(table[stage.start : stage.stop]) for table in tables)


def update_seconds(problem: Problem, stage: Stage, micro_batch: int) -> float:
    """The optimizer's step."""
    tables = [times_of(problem, one, micro_batch).update for one in stage.replicas]
    return max(table[stage.start] for table in tables)


def times_of(problem: Problem, one: Replicas, micro_batch: int) -> Times:
    """The profile of a replica.

    Raises:
        PlanError: there is none.
    """
    device = problem.pools[one.pool].device
    try:
        return problem.profiles[device, one.tp, micro_batch]
    except KeyError:
        raise PlanError(
            f"there is no profile of {device} at tp {one.tp} and micro-batch size {micro_batch}"
        ) from None


def stage_reduce_seconds(problem: Problem, stage: Stage) -> float:
    """All-reduce of the stage's gradients over its slowest link between neighbouring replicas."""
    split = min(MOST_SPLIT, *(one.tp for one in stage.replicas))
    size = sum(problem.parameter_bytes[stage.start : stage.stop]) / split
    links = [(one.pool, one.pool) for one in stage.replicas if one.count > 1]
    links += [(one.pool, other.pool) for one, other in pairwise(stage.replicas)]
    curves = {curve_between(problem, (a, 1), (b, 1)) for a, b in links}
    times = [float(reduce_seconds(problem, size, stage.dp, curve)) for curve in curves]
    return max(times, default=0.0)


def links_between(stage: Stage, other: Stage) -> set[tuple[End, End]]:
    """Who sends to whom: replica j to replica j."""
    found: set[tuple[End, End]] = set()
    mine, theirs = list(stage.replicas), list(other.replicas)
    left = [mine[0].count, theirs[0].count]
    i = j = 0
    while True:
        found.add(((mine[i].pool, mine[i].tp), (theirs[j].pool, theirs[j].tp)))
        step = min(left)
        left = [left[0] - step, left[1] - step]
        if left[0] == 0:
            i += 1
            if i == len(mine):
                return found
            left[0] = mine[i].count
        if left[1] == 0:
            j += 1
            left[1] = theirs[j].count


def transfer_weights(index: int, num_stages: int) -> tuple[int, int]:
    """How often a stage's time holds its activations' transfer onward, its gradients' back."""
    if num_stages == 1:
        return 0, 0
    if index == 0:
        return (1 if num_stages <= 3 else 2), 0
    return (0, 2) if index == num_stages - 1 else (1, 1)


def transfer_seconds(problem: Problem, plan: Plan, index: int) -> float:
    """A stage's transfers of one micro-batch: activations onward, gradients back."""
    stages, stage = plan.stages, plan.stages[index]
    onward, back = transfer_weights(index, len(stages))
    seconds = 0.0
    if onward:
        size = problem.activation_bytes[stage.stop - 1] * plan.micro_batch
        seconds += onward * _slowest(problem, size, links_between(stage, stages[index + 1]))
    if back:
        size = problem.activation_bytes[stage.start] * plan.micro_batch
        seconds += back * _slowest(problem, size, links_between(stage, stages[index - 1]))
    return seconds


def _slowest(problem: Problem, size: float, links: set[tuple[End, End]]) -> float:
    return max(float(seconds_of_bytes(size, curve_between(problem, *link))) for link in links)


def stage_memory_bytes(
    problem: Problem, tp: int, start: int, stop: int, micro_batch: int, remaining: int
) -> float:
    """Of each GPU of a replica.

    Args:
        problem: with the tables.
        tp: of the replica.
        start: the stage's first layer.
        stop: the layer behind its last.
        micro_batch: samples.
        remaining: stages from this one to the last; so many micro-batches are under way.

    Raises:
        PlanError: memory at that tensor parallel degree is not known.
    """
    if tp not in problem.memory:
        raise PlanError(f"there is no memory profile at tp {tp}")
    table = problem.memory[tp]
    model = sum(table.parameters[start:stop]) * problem.bytes_per_parameter
    activations = sum(table.activations[start:stop]) * micro_batch * problem.bytes_per_activation
    return model + activations * remaining + problem.reserved_bytes[tp > 1]


def fits(problem: Problem, plan: Plan) -> bool:
    """Whether every GPU holds its part, and no pool gives more GPUs than it has."""
    used = plan.used(len(problem.pools))
    if any(count > pool.gpus for count, pool in zip(used, problem.pools, strict=True)):
        return False
    count = len(plan.stages)
    return all(
        stage_memory_bytes(problem, one.tp, stage.start, stage.stop, plan.micro_batch, count - i)
        <= problem.pools[one.pool].memory_bytes
        for i, stage in enumerate(plan.stages)
        for one in stage.replicas
    )


def step_seconds(problem: Problem, plan: Plan) -> float:
    """The plan's cost.

    Raises:
        PlanError: stages of unequally many replicas, layers left out or doubled, or something that
            was not profiled.
    """
    check(problem, plan)
    busy = [
        compute_seconds(problem, stage, plan.micro_batch) + transfer_seconds(problem, plan, index)
        for index, stage in enumerate(plan.stages)
    ]
    update = max(update_seconds(problem, stage, plan.micro_batch) for stage in plan.stages)
    reduce = max(stage_reduce_seconds(problem, stage) for stage in plan.stages)
    return (micro_batches(problem, plan) - 1) * max(busy) + sum(busy) + update + reduce


def check(problem: Problem, plan: Plan) -> None:
    """Refuse what is no pipeline.

    Raises:
        PlanError: see :func:`step_seconds`.
    """
    if len({stage.dp for stage in plan.stages}) != 1 or plan.dp < 1:
        counts = [stage.dp for stage in plan.stages]
        raise PlanError(f"every stage must have as many replicas, not {counts}")
    edges = [0, *(stage.stop for stage in plan.stages)]
    starts = [stage.start for stage in plan.stages]
    if starts != edges[:-1] or edges[-1] != problem.num_layers or sorted(set(edges)) != edges:
        raise PlanError(f"the stages must hold layers 0 to {problem.num_layers} once, in order")
