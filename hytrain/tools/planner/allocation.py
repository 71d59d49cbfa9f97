"""State for ranks whose loads are decided: shards, and whole layers on the GPU or on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.tools.planner.cluster import Host
from hytrain.tools.planner.cost_model import Columns, Load, host_budgets, largest_shards
from hytrain.tools.planner.min_plus import Floats, Ints
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.shards import water_fill

# Levels of a host's memory and bandwidth where its ranks compete for them.
_LEVELS = 256
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of the state.

    Attributes:
        fraction: its shard, of the model.
        gpu_layers: K, so many layers of the shard are updated on the GPU.
    """

    fraction: float
    gpu_layers: int


def allocate(
    problem: PlanProblem, loads: Sequence[Load], step: float, *, even: bool
) -> list[Share] | None:
    """Shares with which every rank keeps to a step of so many seconds; None where there are none.

    Exact where the ranks of a host do not compete for its memory or bandwidth; where they do, what
    each gets is rounded down to a level, 1/256 of what the host has.
    """
    shares: list[Share] = []
    first = 0
    for host in problem.cluster.hosts:
        works = loads[first : first + len(host.gpus)]
        first += len(host.gpus)
        found = _on_host(problem, host, works, step, even=even)
        if found is None:
            return None
        shares += found
    rooms = [share.fraction for share in shares]
    if even:
        each = 1.0 / len(shares)
        if min(rooms) < each * (1.0 - _ROUNDING):
            return None
        fractions = [each] * len(shares)
    elif math.fsum(rooms) < 1.0:  # as water_fill adds them
        return None
    else:
        fractions = water_fill(rooms, 1.0)
    return [
        Share(fraction, share.gpu_layers) for fraction, share in zip(fractions, shares, strict=True)
    ]


def _on_host(
    problem: PlanProblem, host: Host, works: Sequence[Load], step: float, *, even: bool
) -> list[Share] | None:
    """The most state for the ranks of one host."""
    whole = problem.model.parameters
    offloaded = np.array([work.offloaded for work in works])
    budgets = host_budgets(problem, host, step)
    limits = [(one.capacity - float(one.draw(offloaded).sum())) / whole for one in budgets]
    if min(limits) < 0.0:
        return None
    most = 1.0 / problem.cluster.num_ranks if even else 1.0
    rooms: list[Floats] = []
    for gpu, work in zip(host.gpus, works, strict=True):
        room = largest_shards(problem, host, gpu, Columns.of([work]), step)[0]
        if room[0] < 0.0:
            return None
        rooms.append(np.minimum(room / whole, most))
    on_host = 1.0 - problem.model.gpu_parts
    # What a shard takes of each, by the number of its GPU layers: 1 with none.
    takes = [1.0 - one.relief + one.relief * on_host for one in budgets]
    # Of the numbers of GPU layers with the most room, the one that takes the least of the host.
    best = [int(np.flatnonzero(room >= room.max() * (1.0 - _ROUNDING))[-1]) for room in rooms]
    most = [float(room[number]) for room, number in zip(rooms, best, strict=True)]
    choices = [most]
    if problem.offload_param:  # the host has a part of all of it: then no more than the whole
        choices.append(water_fill(most, min(1.0, math.fsum(most))))
    for shards in choices:
        taken = [
            sum(shard * float(take[k]) for shard, k in zip(shards, best, strict=True))
            for take in takes
        ]
        if all(
            part <= limit * (1.0 + _ROUNDING) for part, limit in zip(taken, limits, strict=True)
        ):
            return [Share(shard, k) for shard, k in zip(shards, best, strict=True)]
    return _compete(rooms, np.maximum(*takes), min(limits))


def _compete(rooms: Sequence[Floats], on_host: Floats, limit: float) -> list[Share]:
    """The largest sum of shards with so much on the host, on a grid of levels.

    ``on_host``: what a shard takes of that, by the number of its GPU layers.
    """
    levels = np.arange(_LEVELS + 1)
    available = limit * levels / _LEVELS
    best = np.zeros(_LEVELS + 1)
    ranks: list[tuple[Floats, Ints, Ints]] = []
    for room in rooms:
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(on_host > 0.0, available[:, None] / on_host, np.inf)
        shards = np.minimum(room, scaled)
        numbers = shards.shape[1] - 1 - shards[:, ::-1].argmax(axis=1)
        shard = shards[levels, numbers]
        sums = np.where(
            levels[:, None] >= levels, best[np.maximum(levels[:, None] - levels, 0)] + shard, -1.0
        )
        taken = sums.argmax(axis=1)
        ranks.append((shard, numbers, taken))
        best = sums[levels, taken]
    shares: list[Share] = []
    level = _LEVELS
    for shard, numbers, taken in reversed(ranks):
        own = int(taken[level])
        shares.append(Share(float(shard[own]), int(numbers[own])))
        level -= own
    return shares[::-1]
