"""The two published searches, for comparison: Metis (USENIX ATC 2024) and its improved variant.

Depth first: every stage starts at (group, 1) of data and tensor parallel; layers are dealt, and
while memory does not suffice at once, dp is halved and tp doubled on the stage with least slack.
The improved variant changes the slack: that of the layers as they were dealt first, so that the
stage most over its memory moves first; Metis has none where no dealing fitted, and takes the stages
of most replicas in turn.

``count`` is what the published table counts: moves and dealings of layers that did not fit. What is
not taken over: costs of half a plan, plans that cannot run, results that vary with the hash seed
and the folder's listing (docs/hybrid_planning.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from hytrain.errors import PlanError
from hytrain.tools.hybrid import layer_balancer
from hytrain.tools.hybrid.cost_model import (
    NOTHING_MB,
    Choice,
    Ranks,
    choices,
    plan_cost,
    published_slices,
)
from hytrain.tools.hybrid.layer_balancer import Dealt
from hytrain.tools.hybrid.problem import Options, Plan, Problem
from hytrain.tools.hybrid.search import Found, NoPlanError, Result
from hytrain.tools.hybrid.space import least_group, micro_batch_counts, orders

Variant = Literal["metis", "metis-improved"]


@dataclass(frozen=True)
class _Start:
    """Where a descent begins."""

    order: tuple[str, ...]
    groups: tuple[int, ...]
    micro_batches: int


@dataclass(frozen=True)
class _Stage:
    """Of a stage's choice, what the descent looks at."""

    speed: float
    """One over the time of all layers."""

    memory: list[list[float]]
    """Of each slice that is held, MB of the layers below each."""

    capacity: float


@dataclass
class _Counts:
    steps: int = 0
    """Moves, and partitions that did not fit."""

    plans: int = 0


def plan(problem: Problem, variant: Variant = "metis", *, top: int = 1) -> Result:
    """The best executable plan that a published search meets.

    Args:
        problem: to be planned; no option beyond the published model but ``tp_speed``.
        variant: which search.
        top: how many plans.

    Raises:
        PlanError: an option that the published searches do not know.
        NoPlanError: none of the plans that it meets can run.
    """
    others = replace(problem.options, tp_speed="slowest")
    if others != Options():
        raise PlanError(f"{variant} knows the published model only: search with exact for {others}")
    began = time.perf_counter()
    counts = _Counts()
    descent = _Descent(problem, variant, counts)
    best: list[Found] = []
    for start in _starts(problem):
        for found in descent.plans(start):
            counts.plans += 1
            if not _can_run(problem, found):
                continue
            best.append(Found(found, plan_cost(problem, found).total))
        # Some starts come twice.
        best = sorted(dict.fromkeys(best), key=lambda one: one.cost)[:top]
    if not best:
        raise NoPlanError(f"{variant} meets no plan that fits and can run: search with exact")
    return Result(
        best=tuple(best),
        bound=0.0,
        is_optimal=False,
        evaluations=counts.plans,
        count=counts.steps,
        seconds=time.perf_counter() - began,
    )


def _can_run(problem: Problem, found: Plan) -> bool:
    layers = found.partition
    return layers[-1] == problem.num_layers and len(set(layers)) == len(layers)


# -- where descents begin ----------------------------------------------------------------------


def _starts(problem: Problem) -> Iterator[_Start]:
    """In the published order; each order of types but the first has the groups of the second stage
    count with any (instead of one stage, and once more in their place)."""
    counts = range(1, min(problem.num_gpus, problem.num_layers) + 1)
    groups = [list(_groups(problem, stages)) for stages in counts]
    groups = [some for some in groups if some]
    if max(len(one) for some in groups for one in some) > problem.max_permute_len:
        raise PlanError(
            f"max_permute_len {problem.max_permute_len} is less than the stages there can be: the "
            "published searches would leave orders of groups out; exact leaves none"
        )
    for number, order in enumerate(orders(problem)):
        listed = groups if number == 0 or len(groups) == 1 else [groups[1], *groups[1:]]
        for some in listed:
            for one in some:
                for micro_batches in reversed(micro_batch_counts(problem)):
                    yield _Start(order, one, micro_batches)


def _groups(problem: Problem, stages: int) -> Iterator[tuple[int, ...]]:
    """Ordered powers of two, none less than allowed, that add up to the cluster."""
    least = least_group(problem, stages)

    def rest(left: int, gpus: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
            return
        group = least
        while group + (left - 1) * least <= gpus:
            if left > 1 or group == gpus:
                yield from ((group, *more) for more in rest(left - 1, gpus - group))
            group *= 2

    yield from rest(stages, problem.num_gpus)


# -- a descent ---------------------------------------------------------------------------------


@dataclass
class _Descent:
    """Goes down from starts, and counts its steps."""

    problem: Problem
    variant: Variant
    counts: _Counts
    _weights: list[float] = field(init=False)
    _stages: dict[object, _Stage | None] = field(default_factory=dict)
    _ranks: dict[tuple[str, ...], Ranks] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.problem.devices[0].name
        if (device, 1, 1) not in self.problem.samples:
            raise PlanError(f"the published searches need the profile of {device} at tp1, bs1")
        times = self.problem.samples[device, 1, 1].times
        self._weights = [one / sum(times) for one in times]

    def plans(self, start: _Start) -> Iterator[Plan]:
        """The plans that fit, down to the first whose layers fitted at once.

        As published, what a descent does after its last plan is not counted.
        """
        steps = 0
        strategies = [(group, 1) for group in start.groups]
        slack: tuple[float, ...] = ()
        while True:
            dealt = self._deal(start, strategies)
            if dealt is not None:
                steps += dealt.failures
                if dealt.partition is not None:
                    self.counts.steps += steps
                    steps = 0
                    yield Plan(
                        start.order,
                        start.groups,
                        tuple(strategies),
                        start.micro_batches,
                        dealt.partition,
                    )
                    if dealt.attempts == 1:
                        return
                if self.variant == "metis-improved":
                    slack = dealt.first_slack
                else:
                    slack = dealt.slack if dealt.partition is not None else ()
            key = slack or [1 / dp for dp, _ in strategies]
            movable = [i for i, (dp, _) in enumerate(strategies) if dp > 1]
            if not movable:
                return
            steps += 1
            stage = min(movable, key=key.__getitem__)
            dp, tp = strategies[stage]
            strategies[stage] = (dp // 2, tp * 2)

    def _deal(self, start: _Start, strategies: list[tuple[int, int]]) -> Dealt | None:
        """The layers dealt; None where a stage cannot run its samples."""
        firsts = accumulate(start.groups, initial=0)
        found: list[_Stage] = []
        for strategy, first in zip(strategies, firsts, strict=False):
            stage = self._stage(start, first, strategy)
            if stage is None:
                return None
            found.append(stage)
        total = sum(one.speed for one in found)
        shares = [one.speed / total for one in found]
        capacity = [one.capacity for one in found]
        first_slack: tuple[float, ...] = ()
        for attempt in range(1, layer_balancer.ATTEMPTS + 1):
            partition = layer_balancer.deal_layers(shares, self._weights)
            demand = [
                sum((held[stop] - held[first] for held in one.memory), start=NOTHING_MB)
                for one, first, stop in zip(found, partition, partition[1:], strict=False)
            ]
            slack = tuple(room - need for room, need in zip(capacity, demand, strict=True))
            first_slack = first_slack or slack
            if min(slack) >= 0:
                return Dealt(partition, attempt, first_slack, slack)
            moved = layer_balancer.moved_shares(shares, capacity, demand)
            if moved is None or attempt == layer_balancer.ATTEMPTS:
                return Dealt(None, attempt, first_slack, slack)
            shares = moved
        raise AssertionError("every attempt returns or goes on to the next")

    def _stage(self, start: _Start, first: int, strategy: tuple[int, int]) -> _Stage | None:
        key = (start.order, first, strategy, start.micro_batches)
        if key not in self._stages:
            ranks = self._ranks.setdefault(start.order, self.problem.ranks(start.order))
            try:
                one = choices(self.problem, ranks, first, strategy, start.micro_batches)[0]
            except PlanError:
                self._stages[key] = None
            else:
                speed = 1.0 / float(one.times[:, -1].max())
                self._stages[key] = _Stage(speed, self._held(one, start), one.capacity)
        return self._stages[key]

    def _held(self, choice: Choice, start: _Start) -> list[list[float]]:
        """Slice by slice: the count of moves depends on the last bit of their sum."""
        if not choice.split:
            return [choice.memory[0].tolist()]
        samples = self.problem.gbs // start.micro_batches
        strategy = (choice.dp, choice.tp)
        slices = published_slices(self.problem, self._ranks[start.order], strategy, samples)
        table, factor = self.problem.memory_sums, self.problem.mem_coef
        return [(factor * table[one]).tolist() for one in slices]
