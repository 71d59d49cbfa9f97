"""Deals state to ranks whose workloads are decided: shards, and whole layers on GPU and CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.planner.cluster import Host
from hytrain.tools.planner.cost_model import Workload, host_parts, largest_shards
from hytrain.tools.planner.problem import Floats, Ints, PlanProblem

# Parts of a host's memory and bandwidth to be dealt if its ranks compete for them.
_LEVELS = 256
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of the state.

    Attributes:
        fraction: its shard, as a share of the model.
        gpu_layers: K, the number of layers of the shard that are updated on the GPU.
    """

    fraction: float
    gpu_layers: int


def allocate(
    problem: PlanProblem, workloads: Sequence[Workload], step: float, *, even: bool
) -> list[Share] | None:
    """Returns shares with which every rank keeps to a step of so many seconds; None if none do.

    Exact if the ranks of a host do not compete for its memory or bandwidth.
    """
    shares: list[Share] = []
    for host, ranks in problem.cluster.host_ranks:
        works = workloads[ranks.start : ranks.stop]
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
    """Returns the largest shares of the ranks of one host; None if they cannot keep to the step."""
    model = problem.model
    whole = model.parameters
    none = np.zeros(())
    offloaded = np.array(math.fsum(work.offloaded for work in works))
    limits = 1.0 - host_parts(problem, host, step, none, none, offloaded)
    if limits.min() < 0.0:
        return None
    most = 1.0 / problem.cluster.num_ranks if even else 1.0
    found = [
        largest_shards(problem, host, gpu, [work], step)[0] / whole
        for gpu, work in zip(host.gpus, works, strict=True)
    ]
    if min(float(room[0]) for room in found) < 0.0:
        return None
    rooms = np.minimum(np.array(found), most)
    # What a shard takes of the host's memory and traffic, by the number of its GPU layers.
    on_gpu = model.gpu_parts * whole
    takes = host_parts(problem, host, step, on_gpu, whole - on_gpu, none)
    # Of the numbers of GPU layers with the most room, the one that takes the least of the host.
    roomy = rooms >= rooms.max(axis=1, keepdims=True) * (1.0 - _ROUNDING)
    layers = rooms.shape[1] - 1 - roomy[:, ::-1].argmax(axis=1)
    shards = rooms[np.arange(len(rooms)), layers]
    choices = [shards]
    if problem.offload_param:  # hosts hold the weights of all shards: no more than the whole
        choices.append(np.array(water_fill(shards.tolist(), min(1.0, math.fsum(shards)))))
    for chosen in choices:
        if (takes[:, layers] @ chosen <= limits + _ROUNDING).all():
            pairs = zip(chosen.tolist(), layers.tolist(), strict=True)
            return [Share(shard, number) for shard, number in pairs]
    return _compete(rooms, (takes / np.maximum(limits, _ROUNDING)[:, None]).max(axis=0))


def _compete(rooms: Floats, takes: Floats) -> list[Share]:
    """Returns large shards that fit the host together: a dynamic program over parts of the host.

    (Raising a price of the host until all take no more is not enough: a GPU's room is worth the
    same to all of them, but not every shard fills it with whole layers.)

    Args:
        rooms: the largest shards, a row per rank, a column per number of GPU layers.
        takes: the share of the host that a shard takes, by the number of its GPU layers.
    """
    levels = np.arange(_LEVELS + 1)
    has = levels[:, None] / _LEVELS
    left = levels[:, None] - levels
    within = np.divide(has, takes, out=np.full((len(levels), len(takes)), np.inf), where=takes > 0)
    most = np.zeros(len(levels))
    chosen: list[tuple[Floats, Ints, Ints]] = []
    for room in rooms:
        fitting = np.minimum(room, within)
        layers = len(takes) - 1 - fitting[:, ::-1].argmax(axis=1)
        shards = fitting[levels, layers]
        sums = np.where(left >= 0, most[np.maximum(left, 0)] + shards, -1.0)
        own = sums.argmax(axis=1)
        most = sums[levels, own]
        chosen.append((shards, layers, own))
    found: list[Share] = []
    level = _LEVELS
    for shards, layers, own in reversed(chosen):
        part = own[level]
        found.append(Share(float(shards[part]), int(layers[part])))
        level -= part
    return found[::-1]


def water_fill(rooms: Sequence[float], total: float) -> list[float]:
    """Returns shares that sum to the total: the same for all, or a member's room if that is less.

    Raises:
        PlanError: all rooms together are less than the total.
    """
    if math.fsum(rooms) < total:
        raise PlanError(f"{total} to be shared, but there is room for {math.fsum(rooms)} only")
    shares = [0.0] * len(rooms)
    left = total
    order = sorted(range(len(rooms)), key=lambda index: rooms[index])
    for position, index in enumerate(order):
        shares[index] = min(rooms[index], left / (len(order) - position))
        left -= shares[index]
    return shares
