"""Hybrid plans by brute force, and random problems small enough for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import cache

from hytrain.errors import PlanError
from hytrain.tools.hybrid.cost_model import (
    BANDWIDTH_UNIT,
    Stage,
    bandwidth,
    choices,
    stage,
)
from hytrain.tools.hybrid.problem import (
    Constants,
    DeviceType,
    Host,
    Node,
    Options,
    Plan,
    Problem,
    Samples,
)


def compositions(total: int, stages: int, least: float) -> Iterator[tuple[int, ...]]:
    """Yields sequences of ``stages`` powers of two, each >= ``least``, that add up to ``total``."""
    if stages == 0:
        if total == 0:
            yield ()
        return
    for group in (2**k for k in range(total.bit_length())):
        if group >= least:
            for rest in compositions(total - group, stages - 1, least):
                yield (group, *rest)


def all_plans(problem: Problem) -> Iterator[Plan]:
    """Yields the published space's executable plans, whether or not they fit and were profiled."""
    layers, gpus = problem.num_layers, problem.num_gpus
    hosts = (False, True) if problem.options.host is not None else (False,)
    for stages in range(1, min(layers, gpus) + 1):
        least = max(gpus // stages, stages // gpus) * problem.variance
        for groups in compositions(gpus, stages, least):
            degrees = [[2**k for k in range(n.bit_length())] for n in groups]
            for order, count, tps, cut, on_host in itertools.product(
                itertools.permutations(device.name for device in problem.devices),
                [count for count in range(1, problem.gbs + 1) if problem.gbs % count == 0],
                itertools.product(*degrees),
                itertools.combinations(range(1, layers), stages - 1),
                itertools.product(hosts, repeat=stages),
            ):
                strategies = tuple((n // tp, tp) for n, tp in zip(groups, tps, strict=True))
                kept = on_host if any(on_host) else ()
                yield Plan(order, groups, strategies, count, (0, *cut, layers), kept)


def brute_force(problem: Problem) -> tuple[float, Plan | None, int]:
    """Returns the least cost of the plans that fit, such a plan, and how many were profiled.

    Costs are added up here; the stages are the cost model's, each computed once.
    """
    ranks = {order: problem.ranks(order) for order in itertools.permutations(problem.device)}

    @cache
    def one_stage(
        order: tuple[str, ...],
        first: int,
        strategy: tuple[int, int],
        count: int,
        layers: tuple[int, int],
        on_host: bool,
    ) -> Stage | None:
        try:
            found = choices(problem, ranks[order], first, strategy, count)
        except PlanError:
            return None
        return stage(problem, found[on_host], *layers)

    @cache
    def link(order: tuple[str, ...], first: int, stop: int) -> float:
        return bandwidth(problem, ranks[order][first:stop]) * BANDWIDTH_UNIT

    least, best = float("inf"), None
    profiled = 0
    for plan in all_plans(problem):
        starts = list(itertools.accumulate(plan.groups, initial=0))
        stages = [
            one_stage(
                plan.order,
                starts[i],
                strategy,
                plan.micro_batches,
                plan.partition[i : i + 2],  # type: ignore[arg-type]
                plan.offloads(i),
            )
            for i, strategy in enumerate(plan.strategies)
        ]
        if None in stages:
            continue
        profiled += 1
        known = [one for one in stages if one is not None]
        if not all(one.fits for one in known):
            continue
        times = [one.time for one in known]
        sends = [
            one.activation / link(plan.order, starts[i], starts[i + 2])
            for i, one in enumerate(known[:-1])
        ]
        again = problem.constants.batch_generator_ms + known[-1].choice.fb_sync
        cost = (
            sum(times)
            + (plan.micro_batches - 1) * max(times)
            + plan.micro_batches * again
            + max(one.update for one in known)
            + max(one.gradients for one in known)
            + sum(sends)
        )
        if cost < least:
            least, best = cost, plan
    return least, best, profiled


def random_problem(seed: int) -> Problem:
    """A problem with 6 to 8 GPUs of 2 or 3 types, and random times, memory, bandwidths, options."""
    draw = random.Random(seed)
    names = ["a", "b", "c"][: draw.choice((2, 2, 3))]
    counts = _deal(draw, draw.randint(6, 8), len(names))
    nodes: list[Node] = []
    for name, count in zip(names, counts, strict=True):
        while count:
            gpus = draw.randint(1, count)
            nodes.append(Node(f"{name}{len(nodes)}", name, gpus))
            count -= gpus
    draw.shuffle(nodes)
    layers = draw.randint(2, 5)
    # Large enough that sends and gradients matter compared with times of milliseconds.
    hidden = draw.choice((10**3, 10**5, 10**6))
    devices = tuple(
        DeviceType(
            name,
            draw.uniform(100, 800),
            draw.choice((10.0, 40.0, draw.uniform(5, 60))),
            draw.choice((1.0, 5.0, draw.uniform(0.5, 20))),
        )
        for name in names
    )
    return Problem(
        nodes=tuple(nodes),
        devices=devices,
        samples=_random_samples(draw, names, layers),
        constants=Constants(
            optimizer_ms=draw.uniform(0, 40),
            batch_generator_ms=draw.uniform(0, 2),
            parameter_bytes=tuple(draw.uniform(0, 1e8) for _ in range(layers)),
        ),
        gbs=draw.choice((4, 6, 8, 8, 12)),
        hidden_size=hidden,
        sequence_length=16,
        vocab_size=4 * hidden,
        max_tp=draw.choice((2, 4, 8)),
        max_batch=draw.choice((4, 8, 16)),
        variance=draw.choice((1.0, 1.0, 0.5, 0.25)),
        mem_coef=1.0,
        options=Options(
            tp_speed=draw.choice(("first", "slowest")),
            inter_node=draw.random() < 0.5,
            per_gpu_memory=draw.random() < 0.3,
            host=_random_host(draw) if layers < 4 and draw.random() < 0.3 else None,
        ),
    )


def _deal(draw: random.Random, total: int, parts: int) -> list[int]:
    cuts = sorted(draw.sample(range(1, total), parts - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


def _random_host(draw: random.Random) -> Host:
    return Host(draw.uniform(0.05, 2), draw.uniform(1e8, 1e10), draw.uniform(1, 30))


def _random_samples(
    draw: random.Random, names: list[str], layers: int
) -> dict[tuple[str, int, int], Samples]:
    """Random samples: times fall with tp, times and memory rise with the size; some are missing."""
    found: dict[tuple[str, int, int], Samples] = {}
    for name, tp, size in itertools.product(names, (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12)):
        if draw.random() < 0.08 and size > 1:
            continue
        pace = draw.uniform(0.5, 1.5) * (1 + "abc".index(name)) * (0.4 + size) / tp**0.7
        found[name, tp, size] = Samples(
            tuple(draw.uniform(5, 15) * pace for _ in range(layers)),
            tuple(draw.uniform(5, 15) * (2 + size) for _ in range(layers)),
            draw.uniform(0, 5),
        )
    return found
