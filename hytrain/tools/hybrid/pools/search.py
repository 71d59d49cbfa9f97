"""The cheapest plan over pools of GPUs, with a lower bound on every other.

For each micro-batch size, number of replicas and number of stages (in the order of their bounds,
until the next is above the best plan): labels of partial pipelines are extended stage by stage, and
dropped where even the least that is left to come exceeds the best plan, or another label is nowhere
worse.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.hybrid.pools.cost import step_seconds, transfer_weights
from hytrain.tools.hybrid.pools.counts import find_counts
from hytrain.tools.hybrid.pools.labels import NO_MORE, Labels, most_promising, portions, undominated
from hytrain.tools.hybrid.pools.problem import Floats, Ints, Plan, Problem, Replicas, Stage
from hytrain.tools.hybrid.pools.shapes import Shape, shapes_of
from hytrain.tools.hybrid.pools.smaller_problems import dealt, one_degree, zones_as_one
from hytrain.tools.hybrid.pools.tables import SizeTables, reduce_table

_TOLERANCE = 1e-9
"""Relative; plans closer than this count as equal."""

_FIRST_WIDTH = 4
"""Labels of each layer kept in the first pass, which only looks for a good plan."""

_MERGED_SLACK = 0.02
_NEAR = 8
"""Of zones taken as one, plans this much above the best are dealt out too, so many a shape."""

_FIRST_BEGINNING = 1 / 3
_BEGINNING = 1 / 6
"""Of the time that is left, at most for each part of the space that is begun with."""

_SPARE = 8
"""So many times as many are compared with each other, before they are left out."""


@dataclass(frozen=True)
class Result:
    """The best plan found, and what is known of all others."""

    plan: Plan
    cost: float
    """Seconds of a step."""
    bound: float
    """No plan of the space costs less."""
    seconds: float
    """By the search's clock."""
    best_after: float
    """Of these, until the plan was found."""
    evaluations: int
    """Whole plans costed."""
    labels: int
    """Partial pipelines looked at."""

    @property
    def optimal(self) -> bool:
        return self.bound >= self.cost * (1 - 1e-6)


class _OutOfTimeError(Exception):
    """Raised within a shape, whose labels so far are still to be followed."""


@dataclass
class _State:
    problem: Problem
    clock: Callable[[], float]
    end: float = math.inf
    """Of the clock; time at which the search stops; the whole one not before it has a plan."""
    is_whole: bool = True
    """Rather than a part of the space, to begin with a good plan."""
    best: Plan | None = None
    cost: float = math.inf
    best_at: float = 0.0
    open_bounds: list[float] = field(default_factory=list)
    evaluations: int = 0
    labels: int = 0
    reduction: dict[tuple[int, int], tuple[Floats, Floats]] = field(default_factory=dict)
    """By tables (their id: those of a search's shapes stay alive) and replicas."""
    slack: float = -_TOLERANCE
    """Plans that cost this much more than the best are looked at still, and kept as ``near``."""
    near: list[Plan] = field(default_factory=list)

    @property
    def limit(self) -> float:
        return self.cost * (1 + self.slack)

    @property
    def is_over(self) -> bool:
        return self.clock() > self.end and (self.best is not None or not self.is_whole)

    def check_time(self) -> None:
        if self.is_over:
            raise _OutOfTimeError


def plan_pools(
    problem: Problem,
    *,
    max_seconds: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """The cheapest plan under :func:`.cost.step_seconds`.

    The space: as many replicas in every stage, no more than their number of micro-batches needs;
    GPUs may stay unused; a stage draws replicas from any pools, all of a type with one tensor
    parallel degree, pool after pool (:func:`.kinds.kinds_of` says in which order).

    Args:
        problem: what is given.
        max_seconds: after which the best plan so far is returned, with the bound.
        clock: that says so; with :func:`time.process_time` other work on the machine decides less.

    Raises:
        PlanError: no plan fits into the GPUs' memory.
    """
    start = clock()
    state = _State(problem, clock, math.inf if max_seconds is None else start + max_seconds)
    if len(problem.pools) > 1:
        _begin_with_a_pool_a_stage(state, list(one_degree(problem)), _FIRST_BEGINNING)
        for smaller, members in zones_as_one(problem):
            _begin_with_zones_as_one(state, smaller, members)
        _begin_with_a_pool_a_stage(state, [problem], _BEGINNING)
    waiting = _first_pass(state, shapes_of(problem))
    while waiting and waiting[0][0] < state.limit:
        if state.is_over:
            state.open_bounds.append(waiting[0][0])
            break
        _, _, shape, begun = heapq.heappop(waiting)
        _search(state, shape, begun)
    if state.best is None:
        raise PlanError("no plan fits into the memory of the GPUs, whatever their number of stages")
    return Result(
        plan=state.best,
        cost=state.cost,
        bound=min([state.cost, *state.open_bounds]),
        seconds=clock() - start,
        best_after=state.best_at - start,
        evaluations=state.evaluations,
        labels=state.labels,
    )


def _first_pass_of_part(
    state: _State, part: Problem, shapes: list[Shape], share: float, slack: float = -_TOLERANCE
) -> _State:
    """A first pass through a part of the space, for a share of the time that is left."""
    now = state.clock()
    end = now + (state.end - now) * share
    begun = _State(part, state.clock, end, is_whole=False, slack=slack, cost=state.cost)
    _first_pass(begun, shapes)
    state.labels += begun.labels
    return begun


def _begin_with_a_pool_a_stage(state: _State, parts: list[Problem], share: float) -> None:
    """The best of few labels where no stage draws from several pools: there are few kinds then."""
    shapes = [shape for part in parts for shape in shapes_of(part, most_pools=1)]
    shapes.sort(key=lambda shape: shape.bound)
    found = _first_pass_of_part(state, state.problem, shapes, share)
    if found.best is not None:
        _consider(state, found.best)


def _begin_with_zones_as_one(state: _State, smaller: Problem, members: list[list[int]]) -> None:
    """Deal out what is nearly the best plan of zones taken as one."""
    found = _first_pass_of_part(state, smaller, shapes_of(smaller), _BEGINNING, _MERGED_SLACK)
    for plan in found.near:
        whole = dealt(state.problem, plan, members)
        if whole is not None:
            _consider(state, whole)


_Waiting = list[tuple[float, int, Shape, Labels]]
"""Shapes by bound and number, with the labels of their first stage."""


def _first_pass(state: _State, shapes: list[Shape]) -> _Waiting:
    """Look at every shape, most promising first, with few labels; those cut short are returned."""
    soon = 3 if len(state.problem.pools) == 1 else 1
    for shape in shapes:
        # Few stages are soon decided, and a good plan spares looking at much of the rest.
        if shape.stages <= soon and shape.bound < state.limit:
            begun = _extend(state, shape, None, 0)
            if len(begun.stop):
                _search(state, shape, begun)
    waiting: list[tuple[float, int, Shape, Labels | None]] = [
        (shape.bound, number, shape, None)
        for number, shape in enumerate(shapes)
        if shape.stages > soon
    ]
    again: _Waiting = []
    while waiting and waiting[0][0] < state.limit:
        if state.is_over:
            state.open_bounds.append(waiting[0][0])
            break
        bound, number, shape, begun = heapq.heappop(waiting)
        if begun is None:
            try:
                begun = _undominated(state, shape, _extend(state, shape, None, 0))
            except _OutOfTimeError:
                state.open_bounds.append(bound)
                break
            if len(begun.stop):
                heapq.heappush(waiting, (float(begun.bound.min()), number, shape, begun))
        elif not _search(state, shape, begun, width=_FIRST_WIDTH):
            again.append((bound, number, shape, begun))
    heapq.heapify(again)
    return again


# -- one shape ---------------------------------------------------------------------------------


def _search(state: _State, shape: Shape, begun: Labels, *, width: int | None = None) -> bool:
    """Follow the labels of a first stage to whole plans, until the time is over.

    Returns:
        Whether that was all of them, rather than the ``width`` most promising after each stage.
    """
    levels = [begun]
    whole = True
    for index in range(1, shape.stages):
        try:
            labels, all_kept = _next_level(state, shape, levels[-1], index, width)
        except _OutOfTimeError:
            state.open_bounds.append(float(levels[-1].bound.min()))
            return False
        whole = whole and all_kept
        if not len(labels.stop):
            return whole
        levels.append(labels)
    leaves = np.argsort(levels[-1].bound, kind="stable")
    for leaf in leaves if state.slack < 0 else leaves[:_NEAR]:
        bound = float(levels[-1].bound[leaf])
        if bound >= state.limit:
            break
        _finish(state, shape, levels, int(leaf), bound)
    return whole


def _next_level(
    state: _State, shape: Shape, labels: Labels, index: int, width: int | None
) -> tuple[Labels, bool]:
    """The labels with stage ``index``, and whether none were left out for the width."""
    found = _extend(state, shape, labels, index)
    if width is None:
        return _undominated(state, shape, found), True
    near = most_promising(found, _SPARE * width)
    front = _undominated(state, shape, near)
    kept = most_promising(front, width)
    return kept, len(near.stop) == len(found.stop) and len(kept.stop) == len(front.stop)


def _undominated(state: _State, shape: Shape, labels: Labels) -> Labels:
    repeats = shape.micro_batches - 1
    return undominated(labels, len(shape.tables.kinds), repeats, state.check_time)


def _reduce_ahead(reduce: Floats, layers: int, stages: int) -> Floats:
    least = np.where(np.tri(layers + 1, dtype=bool), np.inf, reduce.min(axis=0))
    ahead = np.full((stages + 1, layers + 1), np.inf)
    ahead[0, layers] = 0.0
    for left in range(1, stages + 1):
        ahead[left] = np.maximum(least, ahead[left - 1][None, :]).min(axis=1)
    return ahead


def _extend(state: _State, shape: Shape, labels: Labels | None, index: int) -> Labels:
    """Every way to add stage ``index``, without those that cannot become better than the best."""
    if labels is None:
        none, zero = np.zeros(1), np.zeros(1, dtype=int)
        used = np.zeros((1, shape.tables.usage.shape[1]))
        labels = Labels(zero, zero, none, none, none, none, none, used, none, zero - 1, none, none)
    reduce = _reduction(state, shape)
    parts: list[Labels] = []
    for which in portions(labels):
        if index:
            state.check_time()
        parts.append(_extended(state, shape, reduce, labels, which, index))
    found = Labels(
        **{name: np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])}
    )
    state.labels += len(found.stop)
    return found


def _reduction(state: _State, shape: Shape) -> tuple[Floats, Floats]:
    """The shape's :func:`reduce_table`, and the least of stages to come; kept for others."""
    key = (id(shape.tables), shape.dp)
    if key not in state.reduction:
        table = reduce_table(state.problem, shape.tables, shape.dp)
        layers = state.problem.num_layers
        state.reduction[key] = (table, _reduce_ahead(table, layers, layers))
    return state.reduction[key]


def _extended(
    state: _State,
    shape: Shape,
    reduction: tuple[Floats, Floats],
    labels: Labels,
    which: Ints,
    index: int,
) -> Labels:
    tables, layers = shape.tables, state.problem.num_layers
    reduce, reduce_ahead = reduction
    capacity = shape.capacity
    begun = labels.take(which)
    start = begun.stop
    left = shape.stages - 1 - index
    stops = np.arange(int(start.min()) + 1, layers + 1 - left) if left else np.array([layers])
    # Arrays are [label, kind, stop].
    onward = back = np.zeros((len(which), len(tables.kinds), 1))
    if index:
        sends, _ = transfer_weights(index - 1, shape.stages)
        _, returns = transfer_weights(index, shape.stages)
        onward = sends * tables.link[start - 1, begun.kind][:, :, None]
        back = returns * tables.link.swapaxes(1, 2)[start, begun.kind][:, :, None]
    before = begun.last[:, None, None] + onward
    total = begun.total[:, None, None] + before
    slowest = np.maximum(begun.slowest[:, None, None], before)

    def following(table: Floats) -> Floats:
        return table[:, start[:, None], stops].swapaxes(0, 1)

    # Infinite where a label has gone beyond that layer already.
    compute = np.where(following(tables.depth) >= left + 1, following(tables.compute), np.inf)
    last = compute + back
    update = np.maximum(begun.update[:, None, None], tables.update[:, start].T[:, :, None])
    reduced = np.maximum(begun.reduce[:, None, None], following(reduce))
    used = begun.used[:, None] + shape.dp * tables.usage[None]
    room = np.all(used <= capacity + 1e-9, axis=2)
    free = (capacity[-1] - used[:, :, -1])[:, :, None]
    work = shape.dp * (tables.work[-1] - tables.work[stops])[None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        shared = np.where(work > 0, work / np.maximum(free, 1e-300) + shape.ahead.transfer, 0.0)
    sends, _ = transfer_weights(index, shape.stages)
    own = last + (sends * shape.ahead.transfer if left else 0.0)
    most = np.maximum(
        np.maximum(slowest, own), np.maximum(shared, shape.ahead.slowest[left][stops])
    )
    repeated = (shape.micro_batches - 1) * most if shape.micro_batches > 1 else 0.0
    bound = (
        repeated
        + total
        + own
        + shape.ahead.total[left][stops]
        + update
        + np.maximum(reduced, reduce_ahead[left][stops])
    )
    keep = (bound < state.limit) & np.isfinite(bound) & room[:, :, None]
    label, kind, stop = np.nonzero(keep)
    full = bound.shape
    found = Labels(
        stop=stops[stop],
        kind=kind,
        total=np.broadcast_to(total, full)[keep],
        slowest=np.broadcast_to(slowest, full)[keep],
        last=np.broadcast_to(last, full)[keep],
        update=np.broadcast_to(update, full)[keep],
        reduce=np.broadcast_to(reduced, full)[keep],
        used=used[label, kind],
        mixed=begun.mixed[label] + tables.mixed[kind],
        parent=which[label],
        bound=bound[keep],
        floor=np.broadcast_to(most, full)[keep],
    )
    if not left or not len(found.stop):
        return found
    floor = _floors(tables, (capacity - found.used) / shape.dp, left, found.stop)
    more = np.maximum(floor - found.floor, 0)
    # Where no threshold suffices, not even for a single micro-batch, there are too few GPUs.
    repeats = np.where(np.isinf(floor), 1, shape.micro_batches - 1)
    found.bound = found.bound + repeats * more
    found.floor = np.maximum(floor, found.floor)
    return found.take(np.nonzero(found.bound < state.limit)[0])


def _floors(tables: SizeTables, free: Floats, left: int, stop: Ints) -> Floats:
    """What the slowest stage still to come takes at least, with the GPUs that are left."""
    last = len(tables.thresholds)
    low, high = np.zeros(len(stop), dtype=int), np.full(len(stop), last)
    # The higher the threshold the less is needed: halving finds the first that suffices.
    while np.any(low < high):
        middle = (low + high) // 2
        needs = tables.needs[np.minimum(middle, last - 1), left, stop]
        enough = np.all(needs <= free + NO_MORE, axis=1) | (middle == last)
        high = np.where(enough, middle, high)
        low = np.where(enough, low, np.minimum(middle + 1, high))
    below = np.concatenate([[0.0], tables.thresholds[:-1], [np.inf]])
    return below[low]


def _finish(state: _State, shape: Shape, levels: list[Labels], leaf: int, bound: float) -> None:
    """The plan of a whole pipeline, costed exactly."""
    stops: list[int] = []
    kinds: list[int] = []
    for labels in reversed(levels):
        stops.append(int(labels.stop[leaf]))
        kinds.append(int(labels.kind[leaf]))
        leaf = int(labels.parent[leaf])
    stops, kinds = stops[::-1], kinds[::-1]
    tables = shape.tables
    chosen = [tables.kinds[kind] for kind in kinds]
    gpus = [pool.gpus for pool in state.problem.pools]
    counts, proven = find_counts(chosen, shape.dp, gpus, tables.weights)
    if counts is None:
        if not proven:
            state.open_bounds.append(bound)
        return
    stages = tuple(
        Stage(
            start,
            stop,
            tuple(Replicas(*end, number) for end, number in zip(kind, each, strict=True)),
        )
        for start, stop, kind, each in zip([0, *stops], stops, chosen, counts, strict=False)
    )
    cost = _consider(state, Plan(stages, tables.micro_batch))
    # Other counts of these kinds might cost less than these, not less than the bound.
    if bound < cost * (1 - _TOLERANCE):
        state.open_bounds.append(bound)


def _consider(state: _State, plan: Plan) -> float:
    """Its cost; it is kept if it is the best so far."""
    state.evaluations += 1
    cost = step_seconds(state.problem, plan)
    if cost < state.limit and state.slack > 0:
        state.near.append(plan)
    if cost < state.cost * (1 - _TOLERANCE):
        state.best, state.cost, state.best_at = plan, cost, state.clock()
    return cost
