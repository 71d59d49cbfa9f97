"""The exact search: a plan of least cost, with a certificate.

    from hytrain.tools.hybrid.case_files import read_case
    from hytrain.tools.hybrid.search import plan

    result = plan(read_case(Path("row1")))
    result.plan, result.cost, result.is_optimal, result.bound

The cost of a plan is three maxima over its stages (time, update, gradients) and a sum. Within given
limits on the maxima the least sum is a shortest path (:mod:`.pipeline`), and

    (B-1)*low(time) + low(update) + low(gradients) + least sum within the limits

bounds every plan whose maxima are between the lows and the limits. Such boxes are searched best
bound first: the path found is a plan; what it does not dominate is cut into smaller boxes.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.hybrid.pipeline import UNLIMITED, Limits, Path, Pipelines
from hytrain.tools.hybrid.problem import Plan, Problem
from hytrain.tools.hybrid.space import SizeClass, micro_batch_counts, orders, size_classes
from hytrain.tools.hybrid.stage_tables import Tables

_TOLERANCE = 1e-12
"""Relative; a box that could improve on the plan by less is skipped: that is rounding."""

_LEAST_CUT = 0.02
"""Share of what a bound lacks; a maximum that lacks less is cut right below the path's."""

_KEPT = 64
"""The number of parts of the space whose tables are kept."""


@dataclass(frozen=True)
class Found:
    """A plan with its cost."""

    plan: Plan
    cost: float


@dataclass(frozen=True)
class Result:
    """What a search found."""

    best: tuple[Found, ...]
    """The best plans of the best parts of the space, by ascending cost."""

    bound: float
    """No plan of the space costs less, ms."""

    is_optimal: bool
    evaluations: int
    """Shortest paths computed."""

    count: int
    """Boxes looked at."""

    seconds: float

    @property
    def plan(self) -> Plan:
        return self.best[0].plan

    @property
    def cost(self) -> float:
        return self.best[0].cost

    @property
    def gap(self) -> float:
        """By how much the cost may be above the optimum, relative to the cost."""
        return max(0.0, 1.0 - self.bound / self.cost)


class NoPlanError(PlanError):
    """No plan of the space fits its GPUs."""


@dataclass(frozen=True)
class _Part:
    """An order of types, a size class and a number of micro-batches."""

    order: tuple[str, ...]
    size: SizeClass
    micro_batches: int


@dataclass(frozen=True, order=True)
class _Box:
    """Plans of a part whose maxima are within limits."""

    bound: float
    number: int
    """Serial number, which makes the search deterministic."""

    part: _Part = field(compare=False)
    lows: Limits = field(default=(0.0, 0.0, 0.0), compare=False)
    highs: Limits = field(default=UNLIMITED, compare=False)
    rest: float = field(default=0.0, compare=False)
    """What the sum over stages is known to be at least."""


def plan(problem: Problem, *, top: int = 1, gap: float = 0.0, seconds: float = math.inf) -> Result:
    """Returns the plan of least cost.

    Args:
        problem: to be planned.
        top: how many plans; each is the best of its part of the space (order of types, number of
            micro-batches, class of stage counts), and the parts are the best ones.
        gap: stop at a plan that is proven to be within this of the optimum, relative.
        seconds: stop after that time, once there is a plan, with the best one so far and the bound
            that is proven.

    Raises:
        NoPlanError: no plan fits.
    """
    search = _Search(problem, top)
    return search.run(gap, seconds)


class _Search:
    def __init__(self, problem: Problem, top: int) -> None:
        self._problem, self._top = problem, top
        self._tables = Tables(problem)
        self._pipelines: dict[_Part, Pipelines] = {}
        self._best: dict[_Part, Found] = {}
        self._boxes: list[_Box] = []
        self._made = self._paths = self._looked_at = 0

    def run(self, gap: float, seconds: float) -> Result:
        began = time.perf_counter()
        self._open_parts()
        bound = -math.inf
        while self._boxes:
            # Bounds are rounded: none may fall below what was proven before.
            bound = max(bound, self._boxes[0].bound)
            goal = self._goal()
            is_late = time.perf_counter() - began > seconds and bool(self._best)
            if bound >= goal * (1 - max(gap, _TOLERANCE)) or is_late:
                break
            box = heapq.heappop(self._boxes)
            self._looked_at += 1
            self._look_at(box)
        else:
            bound = math.inf
        return self._result(bound, time.perf_counter() - began)

    def _result(self, bound: float, seconds: float) -> Result:
        if not self._best:
            raise NoPlanError(
                "no plan fits: in each, a stage needs more memory than its GPUs have, or runs at a "
                "(tp, micro-batch size) that was not profiled"
            )
        best = sorted(self._best.values(), key=lambda one: (one.cost, repr(one.plan)))[: self._top]
        is_optimal = bound >= best[0].cost * (1 - _TOLERANCE)
        return Result(
            tuple(best),
            best[0].cost if is_optimal else bound,
            is_optimal,
            self._paths,
            self._looked_at,
            seconds,
        )

    def _goal(self) -> float:
        """Returns the cost that a part must be below to be among the best."""
        if len(self._best) < self._top:
            return math.inf
        return sorted(one.cost for one in self._best.values())[self._top - 1]

    def _push(self, part: _Part, bound: float, *rest: object) -> None:
        if bound < math.inf:
            self._made += 1
            heapq.heappush(self._boxes, _Box(bound, self._made, part, *rest))  # type: ignore[arg-type]

    def _open_parts(self) -> None:
        quick = QuickBounds(self._problem)
        for size in size_classes(self._problem):
            for micro_batches in micro_batch_counts(self._problem):
                bound = quick.bound(size, micro_batches)
                for order in orders(self._problem):
                    self._push(_Part(order, size, micro_batches), bound)

    def _pipelines_of(self, part: _Part) -> Pipelines:
        if part not in self._pipelines:
            if len(self._pipelines) >= _KEPT:
                del self._pipelines[next(iter(self._pipelines))]
            self._pipelines[part] = Pipelines(
                self._problem, self._tables, part.order, part.size, part.micro_batches
            )
        return self._pipelines[part]

    def _look_at(self, box: _Box) -> None:
        part = box.part
        pipelines = self._pipelines_of(part)
        slack = self._limit(part) - self._weigh(part, box.lows, box.rest)
        if slack <= 0.0:
            return
        highs = tighter(box.lows, box.highs, slack, part.micro_batches)
        lows = higher(box.lows, pipelines.least_peaks(highs))
        # The sum is at least the least peak time, even if nothing else is known of it yet.
        if self._weigh(part, lows, max(box.rest, lows[0])) >= self._limit(part) * (1 - _TOLERANCE):
            return
        self._paths += 1
        path = pipelines.cheapest(highs)
        if path is None:
            return
        cost = self._weigh(part, path.peaks, path.rest)
        if part not in self._best or cost < self._best[part].cost:
            self._best[part] = Found(path.plan, cost)
        self._cut(part, lows, highs, path)

    def _limit(self, part: _Part) -> float:
        """Returns the cost that a plan of the part must be below to matter."""
        own = self._best[part].cost if part in self._best else math.inf
        return min(own, self._goal())

    def _weigh(self, part: _Part, peaks: Limits, rest: float) -> float:
        fixed = part.micro_batches * self._problem.constants.batch_generator_ms
        return (part.micro_batches - 1) * peaks[0] + peaks[1] + peaks[2] + rest + fixed

    def _cut(self, part: _Part, lows: Limits, highs: Limits, path: Path) -> None:
        """Pushes boxes of the remaining plans: those with one of the maxima below the path's.

        If none of them is below, the path is best. From the lows on, the maximum that the bound
        lacks most is cut: below the cut is a box; above it the path remains the cheapest, and the
        bound is higher, until it reaches the limit.
        """
        limit = self._limit(part) * (1 - _TOLERANCE)
        weights = (part.micro_batches - 1, 1, 1)
        least_gap = _LEAST_CUT * (limit - self._weigh(part, lows, path.rest))
        low = list(lows)
        while True:
            bound = self._weigh(part, (low[0], low[1], low[2]), path.rest)
            gaps = [w * (p - at) for w, p, at in zip(weights, path.peaks, low, strict=True)]
            widest = max(range(3), key=gaps.__getitem__)
            peak = path.peaks[widest]
            if bound >= limit or gaps[widest] <= 0.0:
                return
            middle = (low[widest] + peak) / 2
            if gaps[widest] <= least_gap or not low[widest] < middle < peak:
                middle, below = peak, math.nextafter(peak, -math.inf)
            else:
                below = middle
            high = tuple(below if i == widest else highs[i] for i in range(3))
            self._push(part, bound, (low[0], low[1], low[2]), high, path.rest)
            low[widest] = middle


def higher(lows: Limits, others: Limits) -> Limits:
    """Returns the larger of each."""
    return max(lows[0], others[0]), max(lows[1], others[1]), max(lows[2], others[2])


def tighter(lows: Limits, highs: Limits, slack: float, micro_batches: int) -> Limits:
    """Returns the limits above which a plan would cost more than the slack allows."""
    weights = (micro_batches - 1, 1, 1)
    found = [
        min(high, low + slack / weight) if weight else high
        for low, high, weight in zip(lows, highs, weights, strict=True)
    ]
    return (found[0], found[1], found[2])


class QuickBounds:
    """Lower bounds on every plan of a size class and number of micro-batches, whatever the order.

    One of a stage's replicas has at least the mean of the samples, and its largest slice at least
    the power of two below: so a layer takes a type of GPU at least m(type, layer), the least
    profiled time of such sizes, and any type at least w(layer), the least of all types. With
    r(type) the least m(type, layer) / w(layer), a stage of that type takes t >= r(type) * (its
    layers' w). There are no more stages than units (a mixed one has a unit that counts as its
    fastest type's), so

        max t >= sum of w / (sum over units of 1 / r(type of the unit)),   sum of t >= sum of w
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._device = np.array([device for device, _, _ in problem.samples])
        self._tp = np.array([tp for _, tp, _ in problem.samples])
        self._share = np.array([share for _, _, share in problem.samples])
        self._times = np.array([one.times for one in problem.samples.values()])
        self._sync = np.array([one.fb_sync for one in problem.samples.values()])
        self._gpus: Counter[str] = Counter()
        for node in problem.nodes:
            self._gpus[node.device] += node.gpus

    def bound(self, size: SizeClass, micro_batches: int) -> float:
        """Returns the bound in ms; infinite if nothing was profiled."""
        samples = self._problem.gbs // micro_batches
        gpus = size.shapes[-1] * size.unit
        can_be = self._tp <= min(gpus, self._problem.max_tp)
        can_be &= 2 * self._share > samples * self._tp / gpus
        if not can_be.any():
            return math.inf
        layers = self._times[can_be].min(axis=0)
        whole = float(layers.sum())
        # Units that two types share count as the fastest type's.
        speed = float(size.units - sum(n // size.unit for n in self._gpus.values()))
        for device, number in self._gpus.items():
            own = can_be & (self._device == device)
            if own.any():
                times = self._times[own].min(axis=0)
                ratio = float(np.min(times[layers > 0] / layers[layers > 0], initial=math.inf))
                speed += (number // size.unit) / max(1.0, ratio)
        speed = min(speed, float(size.most))
        peak = max(float(layers.max()), whole / speed) if speed > 0 else math.inf
        again = float(self._sync[can_be].min()) + self._problem.constants.batch_generator_ms
        return (micro_batches - 1) * peak + whole + micro_batches * again
