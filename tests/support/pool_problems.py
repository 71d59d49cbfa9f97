"""Small problems over pools of GPUs, and every plan of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, product

from hytrain.tools.hybrid.pools.cost import fits
from hytrain.tools.hybrid.pools.kinds import Kind, kinds_of
from hytrain.tools.hybrid.pools.problem import Memory, Plan, Pool, Problem, Replicas, Stage, Times

DEGREES = (1, 2)


def random_problem(seed: int, *, layers: int = 4, gpus: tuple[int, ...] = (4, 4)) -> Problem:
    """Pools of types A, B, ... of random speeds, memories and links."""
    draw = random.Random(seed)
    names = [chr(ord("A") + index) for index in range(len(gpus))]
    profiles: dict[tuple[str, int, int], Times] = {}
    for name in names:
        speed = draw.uniform(1.0, 3.0)
        base = [draw.uniform(0.5, 2.0) * speed for _ in range(layers)]
        for tp, size in product(DEGREES, (1, 2)):
            factor = size**0.9 / tp ** draw.uniform(0.5, 0.9)
            profiles[name, tp, size] = Times(
                tuple(one * factor / 3 for one in base),
                tuple(one * factor for one in base),
                tuple(draw.uniform(0.1, 0.3) for _ in range(layers)),
            )
    parameters = tuple(draw.uniform(1e6, 4e6) for _ in range(layers))
    activations = tuple(draw.uniform(1e6, 4e6) for _ in range(layers))
    ends = [(name, "here", count) for name in names for count in DEGREES]
    return Problem(
        pools=tuple(
            Pool(name, "here", count, draw.uniform(1.5e8, 4e8), 2)
            for name, count in zip(names, gpus, strict=True)
        ),
        profiles=profiles,
        memory={
            tp: Memory(tuple(p / tp for p in parameters), tuple(a / tp for a in activations))
            for tp in DEGREES
        },
        activation_bytes=tuple(draw.choice((4e8, 8e8)) for _ in range(layers)),
        parameter_bytes=tuple(p * 400 for p in parameters),
        curves={(*a, *b): (0.0, draw.uniform(0.1, 0.3), 4.0) for a in ends for b in ends},
        batch=draw.choice((6, 8)),
        reserved_bytes=(0.0, 1e6),
        bucket_bytes=6e8,
    )


def every_plan(problem: Problem) -> Iterator[Plan]:
    """Of the space that the search's docstring names, those that fit."""
    gpus = sum(pool.gpus for pool in problem.pools)
    layers = problem.num_layers
    for size in problem.sizes:
        kinds = kinds_of(problem, size)
        counts = [-(-problem.batch // (size * dp)) for dp in range(1, gpus + 1)]
        for dp in range(1, gpus + 1):
            if dp > 1 and counts[dp - 1] == counts[dp - 2]:
                continue
            replicas = [one for kind in kinds for one in _drawn(kind, dp)]
            for number in range(1, layers + 1):
                for cuts in combinations(range(1, layers), number - 1):
                    edges = [0, *cuts, layers]
                    for chosen in product(replicas, repeat=number):
                        stages = [
                            Stage(a, b, one)
                            for a, b, one in zip(edges[:-1], edges[1:], chosen, strict=True)
                        ]
                        plan = Plan(tuple(stages), size)
                        if fits(problem, plan):
                            yield plan


def _drawn(kind: Kind, dp: int) -> Iterator[tuple[Replicas, ...]]:
    for counts in product(range(1, dp + 1), repeat=len(kind)):
        if sum(counts) == dp:
            yield tuple(Replicas(*end, count) for end, count in zip(kind, counts, strict=True))
