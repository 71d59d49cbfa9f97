"""The kinds of stage: which pools its replicas come from, each with its tensor parallel degree.

A stage's time depends on its kind and layers, not on how many replicas a pool gives; the numbers
matter for the GPUs that are left (:mod:`.counts`).
"""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product

import numpy as np

from hytrain.tools.hybrid.pools.cost import curve_between, seconds_of_bytes
from hytrain.tools.hybrid.pools.problem import End, Floats, Problem

Kind = tuple[End, ...]
"""(pool, tp), in the order of the stage's replicas."""

_REFERENCE_BYTES = 32e6
"""Of a link whose speed decides the order of three pools or more."""


def kinds_of(problem: Problem, micro_batch: int, most_pools: int | None = None) -> list[Kind]:
    """Every kind that is profiled at a micro-batch size, pools of a type with the same degree.

    Two pools come in both orders; more in the order whose slowest neighbours are the fastest.
    """
    node = {pool.device: pool.node_gpus for pool in problem.pools}
    degrees = {
        device: [
            tp
            for name, tp, samples in sorted(problem.profiles)
            if name == device and samples == micro_batch and tp in problem.memory and tp <= most
        ]
        for device, most in node.items()
    }
    found: list[Kind] = []
    everyone = range(len(problem.pools))
    for size in range(1, (most_pools or len(problem.pools)) + 1):
        for members in combinations(everyone, size):
            orders = _orders(problem, members)
            devices = sorted({problem.pools[pool].device for pool in members})
            for chosen in product(*(degrees[device] for device in devices)):
                tp_of = dict(zip(devices, chosen, strict=True))
                found += [
                    tuple((pool, tp_of[problem.pools[pool].device]) for pool in order)
                    for order in orders
                ]
    return found


def _orders(problem: Problem, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    if len(members) <= 2:
        return list(permutations(members))

    def slowest(order: tuple[int, ...]) -> float:
        curves = [curve_between(problem, (a, 1), (b, 1)) for a, b in pairwise(order)]
        return max(float(seconds_of_bytes(_REFERENCE_BYTES, curve)) for curve in curves)

    return [min(permutations(members), key=slowest)]


def weights_of(problem: Problem) -> Floats:
    """Linear bounds on what kinds can use together, one a row, one weight a pool.

    With weights w, a stage of D replicas uses at least D * min over its pools of w * tp, and there
    is sum w * GPUs. The ratios of tensor parallel degrees are the only ones that can bind.
    """
    devices = sorted({pool.device for pool in problem.pools})
    ratios = [1.0] if len(devices) == 1 else [1.0, 2.0, 4.0]
    rows: set[tuple[float, ...]] = set()
    for by_device in product([0.0, *ratios], repeat=len(devices)):
        row = [dict(zip(devices, by_device, strict=True))[pool.device] for pool in problem.pools]
        if any(row):
            least = min(weight for weight in row if weight)
            rows.add(tuple(weight / least for weight in row))
    for one in range(len(problem.pools)):
        rows.add(tuple(float(one == pool) for pool in range(len(problem.pools))))
    return np.array(sorted(rows))


def usage(kinds: list[Kind], weights: Floats) -> Floats:
    """What one replica of each kind uses at least, [kind, weights]."""
    return np.array(
        [np.min([weights[:, pool] * tp for pool, tp in kind], axis=0) for kind in kinds]
    )
