"""Smaller problems, whose best plans are good ones to begin the search with.

All GPUs of a type may have one tensor parallel degree. Or zones are taken as one, since many zones
make many kinds of stage: pools of one type are merged, with the slowest of their links, and a plan
is dealt out to the zones again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product

from hytrain.tools.hybrid.pools.cost import curve_between, fits, seconds_of_bytes, step_seconds
from hytrain.tools.hybrid.pools.problem import Plan, Problem, Replicas, Stage

_REFERENCE_BYTES = 32e6
"""Of a link, to tell which is slower."""


def one_degree(problem: Problem) -> Iterator[Problem]:
    """Problems in which all GPUs of a type have the same tensor parallel degree."""
    degrees: dict[str, set[int]] = {}
    for device, tp, _ in problem.profiles:
        degrees.setdefault(device, set()).add(tp)
    for chosen in product(*(sorted(some) for some in degrees.values())):
        of = dict(zip(degrees, chosen, strict=True))
        profiles = {key: one for key, one in problem.profiles.items() if of[key[0]] == key[1]}
        yield dataclasses.replace(problem, profiles=profiles)


def zones_as_one(problem: Problem) -> Iterator[tuple[Problem, list[list[int]]]]:
    """Problems of one pool a type, of each type alone first, then of all.

    Of 2, 3, ... zones (1 where there is no other) those with the best links.

    Yields:
        The problem, and of each of its pools the pools that it is made of.
    """
    zones = sorted({pool.zone for pool in problem.pools})
    devices = sorted({pool.device for pool in problem.pools})
    together = [[device] for device in devices] if len(devices) > 1 else []
    if len(devices) < len(problem.pools):
        together.append(devices)
    for types in together:
        for number in range(min(2, len(zones)), len(zones) + 1):
            chosen = min(combinations(zones, number), key=lambda some: _slowest(problem, some))
            members = [
                [
                    index
                    for index, pool in enumerate(problem.pools)
                    if pool.device == device and pool.zone in chosen
                ]
                for device in types
            ]
            if any(members):
                yield _merged(problem, [some for some in members if some])


def _slowest(problem: Problem, zones: Sequence[str]) -> float:
    pools = [i for i, pool in enumerate(problem.pools) if pool.zone in zones]
    return max(_seconds(problem, a, 1, b, 1) for a in pools for b in pools)


def _seconds(problem: Problem, one: int, count: int, other: int, number: int) -> float:
    curve = curve_between(problem, (one, count), (other, number))
    return float(seconds_of_bytes(_REFERENCE_BYTES, curve))


def _merged(problem: Problem, members: list[list[int]]) -> tuple[Problem, list[list[int]]]:
    pools = [
        dataclasses.replace(
            problem.pools[some[0]],
            zone="+",
            gpus=sum(problem.pools[i].gpus for i in some),
            memory_bytes=min(problem.pools[i].memory_bytes for i in some),
            node_gpus=min(problem.pools[i].node_gpus for i in some),
        )
        for some in members
    ]
    counts = sorted({key[2] for key in problem.curves})
    curves: dict[tuple[str, str, int, str, str, int], tuple[float, ...]] = {}
    for (a, some), (b, others) in product(enumerate(members), repeat=2):
        for count, number in product(counts, repeat=2):
            if max(count, number) > min(pools[a].node_gpus, pools[b].node_gpus):
                continue
            one, other = max(
                product(some, others),
                key=lambda pair: _seconds(problem, pair[0], count, pair[1], number),
            )
            key = (pools[a].device, "+", count, pools[b].device, "+", number)
            curves[key] = curve_between(problem, (one, count), (other, number))
    return dataclasses.replace(problem, pools=tuple(pools), curves=curves), members


def dealt(problem: Problem, plan: Plan, members: list[list[int]]) -> Plan | None:
    """The plan with replicas from the pools themselves: the cheapest of the orders of zones.

    None where no order leaves whole tensor parallel groups.
    """
    zones = sorted({problem.pools[i].zone for some in members for i in some})
    found = [
        one
        for order in permutations(zones)
        if (one := _dealt_in(problem, plan, members, order)) is not None and fits(problem, one)
    ]
    return min(found, key=lambda one: step_seconds(problem, one), default=None)


def _dealt_in(
    problem: Problem, plan: Plan, members: list[list[int]], order: Sequence[str]
) -> Plan | None:
    left = [pool.gpus for pool in problem.pools]
    queues = [sorted(some, key=lambda i: order.index(problem.pools[i].zone)) for some in members]
    stages: list[Stage] = []
    for stage in plan.stages:
        replicas: list[Replicas] = []
        for one in stage.replicas:
            wanted = one.count
            for pool in queues[one.pool]:
                count = min(wanted, left[pool] // one.tp)
                if count:
                    replicas.append(Replicas(pool, one.tp, count))
                    left[pool] -= count * one.tp
                    wanted -= count
            if wanted:
                return None
        stages.append(Stage(stage.start, stage.stop, tuple(replicas)))
    return Plan(tuple(stages), plan.micro_batch)
