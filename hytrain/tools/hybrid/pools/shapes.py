"""Shapes of plans: micro-batch size, number of replicas and of stages, with a bound on each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hytrain.tools.hybrid.pools.cost import transfer_weights
from hytrain.tools.hybrid.pools.problem import Floats, Problem
from hytrain.tools.hybrid.pools.tables import SizeTables, later_transfer, size_tables


@dataclass(frozen=True)
class Ahead:
    """The least that stages still to come take, by (how many, from which layer)."""

    total: Floats
    slowest: Floats
    transfer: float
    """The least of one stage's transfers, where there are two stages or more."""
    first: Floats
    """Likewise of a first stage, by (stages behind it, layer behind it)."""
    update: float


@dataclass(frozen=True)
class Shape:
    """A micro-batch size, a number of replicas and of stages, with a bound on their plans."""

    bound: float
    tables: SizeTables
    ahead: Ahead
    dp: int
    stages: int
    micro_batches: int
    capacity: Floats
    """Of :attr:`SizeTables.weights`: what there is of GPUs, where they can be used at all."""


def shapes_of(problem: Problem, most_pools: int | None = None) -> list[Shape]:
    """All shapes that may fit, the least bound first.

    Args:
        problem: what is given.
        most_pools: that a stage may draw from; None: all.
    """
    return sorted(_shapes(problem, most_pools), key=lambda shape: shape.bound)


def _shapes(problem: Problem, most_pools: int | None) -> Iterator[Shape]:
    gpus = np.array([pool.gpus for pool in problem.pools])
    for size in problem.sizes:
        tables = size_tables(problem, size, most_pools)
        if tables is None:
            continue
        ahead = _look_ahead(tables, problem.num_layers)
        for dp, micro_batches in _replica_numbers(problem, int(gpus.sum()), size):
            # Where no stage draws from several pools, what is less than a stage's replicas is left.
            usable = gpus // dp * dp if most_pools == 1 else gpus
            capacity = tables.weights @ usable
            stages = np.arange(1, problem.num_layers + 1)
            fewest = tables.usage[:, :-1].min(axis=0) * dp
            most = int(np.sum(np.all(stages[:, None] * fewest <= capacity[:-1] + 1e-9, axis=1)))
            if not most:
                continue
            bounds = _bounds(tables, ahead, dp, micro_batches, capacity[-1])[:most]
            for number, bound in zip(stages.tolist(), bounds.tolist(), strict=False):
                if math.isfinite(bound):
                    yield Shape(bound, tables, ahead, dp, number, micro_batches, capacity)


def _replica_numbers(problem: Problem, gpus: int, size: int) -> Iterator[tuple[int, int]]:
    """(replicas, micro-batches); of equal micro-batches the fewest replicas."""
    seen = 0
    for dp in range(1, gpus + 1):
        count = math.ceil(problem.batch / (size * dp))
        if count != seen:
            seen = count
            yield dp, count


def _look_ahead(tables: SizeTables, layers: int) -> Ahead:
    total = np.full((layers + 1, layers + 1), np.inf)
    slowest = np.full((layers + 1, layers + 1), np.inf)
    total[0, layers] = slowest[0, layers] = 0.0
    for left in range(1, layers + 1):
        fitting = np.where(tables.depth >= left, tables.compute, np.inf).min(axis=0)
        stage = fitting + later_transfer(tables.onward, left)
        total[left] = (stage + total[left - 1][None, :]).min(axis=1)
        slowest[left] = np.maximum(stage, slowest[left - 1][None, :]).min(axis=1)
    firsts = np.array(
        [
            np.where(tables.depth[:, 0] > behind, tables.compute[:, 0], np.inf).min(axis=0)
            for behind in range(layers)
        ]
    )
    transfer = float(tables.onward.min())
    weights = [transfer_weights(0, behind + 1)[0] for behind in range(layers)]
    firsts += transfer * np.array(weights)[:, None]
    return Ahead(total, slowest, transfer, firsts, float(tables.update.min()))


def _bounds(
    tables: SizeTables, ahead: Ahead, dp: int, micro_batches: int, capacity: float
) -> Floats:
    """Of one stage, of two, ...; infinite where there is no room."""
    shared = np.full(len(ahead.first), dp * tables.work[-1] / capacity)
    shared[1:] += ahead.transfer
    slowest = np.maximum(np.maximum(ahead.first, ahead.slowest[:-1]), shared[:, None])
    whole = ahead.first + ahead.total[:-1]
    if micro_batches > 1:
        whole = whole + (micro_batches - 1) * slowest
    return whole.min(axis=1) + ahead.update
