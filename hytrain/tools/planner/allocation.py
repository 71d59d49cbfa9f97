"""State for ranks whose workloads are decided: shards, and whole layers on either side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.tools.planner.arrays import Floats, Ints
from hytrain.tools.planner.cluster import Host
from hytrain.tools.planner.cost_model import Columns, Workload, host_budgets, largest_shards
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.shards import water_fill

# Of the price of a host's memory and bandwidth where its ranks compete for them.
_HALVINGS = 40
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
    problem: PlanProblem, workloads: Sequence[Workload], step: float, *, even: bool
) -> list[Share] | None:
    """Shares with which every rank keeps to a step of so many seconds; None where there are none.

    Exact where the ranks of a host do not compete for its memory or bandwidth.
    """
    shares: list[Share] = []
    first = 0
    for host in problem.cluster.hosts:
        works = workloads[first : first + len(host.gpus)]
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
    problem: PlanProblem, host: Host, works: Sequence[Workload], step: float, *, even: bool
) -> list[Share] | None:
    """The most state for the ranks of one host."""
    model = problem.model
    whole = model.parameters
    budgets = host_budgets(problem, host, step)
    none = np.zeros(1)
    offloaded = sum(work.offloaded for work in works)
    limits = np.array([1.0 - float(one.takes(none, 0.0, offloaded)[0]) for one in budgets])
    if limits.min() < 0.0:
        return None
    most = 1.0 / problem.cluster.num_ranks if even else 1.0
    found = [
        largest_shards(problem, host, gpu, Columns.of([work]), step)[0] / whole
        for gpu, work in zip(host.gpus, works, strict=True)
    ]
    if min(float(room[0]) for room in found) < 0.0:
        return None
    rooms = np.minimum(np.array(found), most)
    # What a shard takes of each, by the number of its GPU layers.
    on_cpu = (1.0 - model.gpu_parts) * whole
    takes = np.array([one.takes(on_cpu, whole, 0.0) for one in budgets])
    # Of the numbers of GPU layers with the most room, the one that takes the least of the host.
    roomy = rooms >= rooms.max(axis=1, keepdims=True) * (1.0 - _ROUNDING)
    layers = rooms.shape[1] - 1 - roomy[:, ::-1].argmax(axis=1)
    shards = rooms[np.arange(len(rooms)), layers]
    choices = [shards]
    if problem.offload_param:  # the host has a part of all of it: then no more than the whole
        choices.append(np.array(water_fill(shards.tolist(), min(1.0, math.fsum(shards)))))
    for chosen in choices:
        if (takes[:, layers] @ chosen <= limits + _ROUNDING).all():
            return _shares(chosen, layers)
    return _compete(rooms, (takes / np.maximum(limits, _ROUNDING)[:, None]).max(axis=0))


def _compete(rooms: Floats, takes: Floats) -> list[Share]:
    """Large shards that take no more than the host has.

    A price of the host is raised until what is worth its price does not take more; at a little less
    the ranks that make the most of the host come first, and one gets what is left.

    Args:
        rooms: the largest shards, a row a rank, a column a number of GPU layers.
        takes: what a shard takes of the host's, by the number of its GPU layers, as a share.
    """
    rows = np.arange(len(rooms))

    def at(price: float) -> tuple[Floats, Ints]:
        layers = (rooms * (1.0 - price * takes)).argmax(axis=1)
        return np.where(price * takes[layers] < 1.0, rooms[rows, layers], 0.0), layers

    low, high = 0.0, 1.0 / max(float(takes[takes > 0.0].min()), _ROUNDING)
    for _ in range(_HALVINGS):
        price = (low + high) / 2.0
        shards, layers = at(price)
        if float(shards @ takes[layers]) > 1.0:
            low = price
        else:
            high = price
    found: list[list[Share]] = []
    for price in (low, high):
        shards, layers = at(price)
        left = 1.0
        for rank in np.argsort(takes[layers]).tolist():
            take = float(takes[layers[rank]])
            shards[rank] = min(shards[rank], left / take if take > 0.0 else math.inf)
            left -= take * shards[rank]
        found.append(_shares(shards, layers))
    return max(found, key=lambda own: sum(share.fraction for share in own))


def _shares(shards: Floats, layers: Ints) -> list[Share]:
    # What is left of a host for its last rank may be below zero by a rounding.
    shards = np.maximum(shards, 0.0)
    return [Share(shard, k) for shard, k in zip(shards.tolist(), layers.tolist(), strict=True)]
