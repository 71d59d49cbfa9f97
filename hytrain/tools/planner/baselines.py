"""What a plan is compared with: the even split, and samples dealt by speed with even shards.

Both are given the best that their rule allows by the same cost model: micro-batches, activation
policies and numbers of GPU layers are searched. *Even*: all ranks do exactly the same. *By speed*:
each rank's samples are proportional to its speed, its micro-batch is its own, shards are even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hytrain.formats.policies import MANNERS, Accumulation, Activations
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    Columns,
    Load,
    fits_rounds,
    largest_shards,
    load,
    shard_that_fits,
)
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import TOLERANCE, Found, OtherManner, Plan, settle, to_plan
from hytrain.tools.uneven.solver import Infeasible

_GIB = 1024**3
_ROUNDING = 1e-9
# So many further numbers of micro-batches are tried without a gain.
_WORSE = 3


@dataclass(frozen=True, slots=True)
class Baseline:
    """A rule, and what comes of it."""

    name: str
    result: Plan | Infeasible


def baselines(problem: PlanProblem) -> tuple[Baseline, ...]:
    """The even split, and samples by speed."""
    return (
        Baseline("even split", even_split(problem)),
        Baseline("samples by speed", samples_by_speed(problem)),
    )


def even_split(problem: PlanProblem) -> Plan | Infeasible:
    """All ranks compute equally many samples, equally many at once, and own equally much.

    A batch that does not divide gives the first ranks one more.
    """
    if problem.needs_rounds and problem.offload_param:
        return best_manner(
            problem, lambda one, _: even_split(one)
        )  # what fetches take of the host is by rounds
    num_ranks = problem.cluster.num_ranks
    if problem.batch < num_ranks:
        return Infeasible(f"a batch of {problem.batch} cannot be split evenly over {num_ranks}")
    batches = [(problem.batch + rank) // num_ranks for rank in reversed(range(num_ranks))]
    makes = _Loads(problem)
    tried: list[list[list[Load]]] = []
    gpus = dict.fromkeys(gpu for _, gpu in problem.cluster.ranks)
    common = set.intersection(*(set(gpu.micro_batches(batches[0])) for gpu in gpus))
    for policy in problem.activations:
        for size in sorted(common):
            if not all(fits_rounds(problem, batch, min(size, batch)) for batch in batches):
                continue
            rows = zip(problem.cluster.ranks, batches, strict=True)
            tried.append(
                [[makes.of(gpu, batch, min(size, batch), policy)] for (_, gpu), batch in rows]
            )
    if not tried:
        return Infeasible(f"an even split does not make {problem.rounds} rounds")
    tried.sort(key=lambda menus: max(menu[0].compute for menu in menus))
    best: Found | None = None
    for menus in tried:
        if best is None or max(menu[0].compute for menu in menus) < best.step:
            found = _fastest(problem, menus, math.inf if best is None else best.step)
            best = found if found is not None else best
    if best is not None:
        return to_plan(problem, best, best.step)
    # The smallest room decides.
    return _missing(problem, max(tried, key=lambda menus: min(menu[0].room for menu in menus)))


def samples_by_speed(problem: PlanProblem) -> Plan | Infeasible:
    """Each rank computes samples by its speed; all own equally much."""
    if problem.needs_rounds:
        return best_manner(problem, lambda one, _: samples_by_speed(one))
    makes = _Loads(problem)
    speeds = [makes.speed(gpu) for _, gpu in problem.cluster.ranks]
    if max(speeds) == 0.0:
        return Infeasible("no rank has room for a single sample")
    batches = _proportional(problem.batch, speeds)
    menus: list[list[Load]] = []
    for (_, gpu), batch in zip(problem.cluster.ranks, batches, strict=True):
        sizes = [
            size
            for size in (gpu.micro_batches(batch) if batch else range(1))
            if fits_rounds(problem, batch, size)
        ]
        if not sizes:
            return Infeasible(f"{batch} samples of {gpu.name} do not make {problem.rounds} rounds")
        menus.append(
            [makes.of(gpu, batch, size, policy) for policy in problem.activations for size in sizes]
        )
    best = _fastest(problem, menus, math.inf)
    return _missing(problem, menus) if best is None else to_plan(problem, best, best.step)


Solver = Callable[[PlanProblem, float], Plan | Infeasible | None]
"""Gives a problem's plan. It may give None where no step is shorter than so many seconds."""


def best_manner(problem: PlanProblem, solve: Solver) -> Plan | Infeasible:
    """The best solution of stage 3, where all ranks use each layer as often, in the same order.

    Either one micro-batch after another: all ranks make as many, of some numbers of them, and all
    store activations or all compute them again. Or all go layer by layer, with as many
    micro-batches as each likes.
    """
    found: dict[Accumulation, Plan | Infeasible] = {}
    for manner, group in MANNERS.items():
        policies: tuple[Activations, ...] = tuple(
            policy for policy in problem.activations if policy in group
        )
        if not policies:
            continue
        if manner == "layer_major":
            solved = solve(replace(problem, activations=policies), math.inf)
            assert solved is not None, "every step is shorter"
            found[manner] = solved
        else:
            found[manner] = _best_rounds(problem, policies, solve)
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    if not plans:
        return _nearest([one for one in found.values() if isinstance(one, Infeasible)])
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    others = [
        OtherManner(manner, other if isinstance(other, Infeasible) else other.predicted_seconds)
        for manner, other in found.items()
        if other is not best
    ]
    return replace(best, other_manner=others[0] if others else None)


def _best_rounds(
    problem: PlanProblem, policies: Sequence[Activations], solve: Solver
) -> Plan | Infeasible:
    """The best of one micro-batch after another, by the number of them and by policy.

    What cannot be shorter than the best so far, which its bound says soon, is not worked out. It
    does not count among those without a gain, either: it might not have fitted.
    """
    best: Plan | None = None
    refusals: list[Infeasible] = []
    for policy in policies:
        worse = 0
        for rounds in _rounds(problem.batch):
            shortest = math.inf if best is None else best.predicted_seconds
            found = solve(replace(problem, activations=(policy,), rounds=rounds), shortest)
            if found is None:
                continue
            if isinstance(found, Infeasible):
                refusals.append(found)
                continue
            if best is None or found.predicted_seconds < best.predicted_seconds:
                best, worse = found, 0
            else:
                worse += 1
            if worse == _WORSE:
                break
    return _nearest(refusals) if best is None else best


def _nearest(refusals: Sequence[Infeasible]) -> Infeasible:
    """The one that comes nearest to fitting."""
    close = [refusal for refusal in refusals if refusal.is_close]
    lacking = [refusal for refusal in refusals if refusal.missing > 0.0]
    if close or not lacking:
        return (close or refusals)[0]
    return min(lacking, key=lambda refusal: refusal.missing)


def _rounds(batch: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: each by a half or a third more than the one before."""
    number = 1
    while number <= batch:
        yield number
        if number > 1 and number * 3 // 2 <= batch:
            yield number * 3 // 2
        number *= 2


def own_speeds(problem: PlanProblem) -> list[float]:
    """Samples/s that each rank computes for itself at its best micro-batch, updates left out."""
    alone = _Loads(problem, Collectives(0.0, 0.0))
    return [alone.speed(gpu) for _, gpu in problem.cluster.ranks]


class _Loads:
    """Loads with even shards, each made once."""

    def __init__(self, problem: PlanProblem, collectives: Collectives | None = None) -> None:
        self._problem = problem
        self._collectives = collectives or Collectives.of(problem, even=True)
        self._made: dict[tuple[object, ...], Load] = {}
        self._speeds: dict[GpuProfile, float] = {}

    def of(self, gpu: GpuProfile, batch: int, size: int, policy: Activations) -> Load:
        """What so many samples take."""
        key = (id(gpu), batch, size, policy)
        if key not in self._made:
            self._made[key] = load(self._problem, gpu, self._collectives, batch, size, policy)
        return self._made[key]

    def speed(self, gpu: GpuProfile) -> float:
        """Samples a second at the best micro-batch that has room; 0 where none has."""
        if gpu not in self._speeds:
            best = 0.0
            for policy in self._problem.activations:
                for size in gpu.micro_batches(self._problem.batch):
                    work = self.of(gpu, size, size, policy)
                    if work.room < 0.0:
                        break
                    best = max(best, size / work.compute)
            self._speeds[gpu] = best
        return self._speeds[gpu]


def _proportional(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion, by largest remainder."""
    exact = [total * weight / math.fsum(weights) for weight in weights]
    shares = [math.floor(share + _ROUNDING) for share in exact]
    order = sorted(range(len(exact)), key=lambda rank: shares[rank] - exact[rank])
    for rank in order[: total - sum(shares)]:
        shares[rank] += 1
    return shares


def _fastest(problem: PlanProblem, menus: Sequence[Sequence[Load]], worst: float) -> Found | None:
    """Of each rank's loads the ones with the shortest step, if that is below ``worst``."""
    chosen = _Chosen(problem, menus)
    low = max(min(work.compute for work in menu) for menu in menus)
    high = min(worst, chosen.longest())
    found = chosen.at(high)
    if found is None:
        return None
    low = min(low, high)
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2.0
        better = chosen.at(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better if better.step < found.step else found
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Ranks that choose from the same loads."""

    host: Host
    gpu: GpuProfile
    menu: tuple[Load, ...]
    columns: Columns


class _Chosen:
    """Each rank's load with which it can own its part, for a step's length."""

    def __init__(self, problem: PlanProblem, menus: Sequence[Sequence[Load]]) -> None:
        self._problem = problem
        kinds: dict[tuple[int, int, tuple[int, ...]], _Kind] = {}
        self._kinds: list[_Kind] = []
        for (host, gpu), menu in zip(problem.cluster.ranks, menus, strict=True):
            key = id(host), id(gpu), tuple(id(work) for work in menu)
            if key not in kinds:
                kinds[key] = _Kind(host, gpu, tuple(menu), Columns.of(menu))
            self._kinds.append(kinds[key])

    def longest(self) -> float:
        """Seconds after which no further time would help."""
        problem, whole = self._problem, self._problem.model.parameters
        seconds = 0.0
        for kind in dict.fromkeys(self._kinds):
            work = 2.0 * float(kind.columns.compute.max())
            copied = problem.model.itemsize * whole + float(kind.columns.offloaded.max())
            updates = whole / kind.gpu.update_rate + whole / kind.host.rank_update_rate
            fetches = whole * float(kind.columns.slope.max(initial=0.0))
            traffic = problem.state_traffic + problem.shard_traffic
            moved = traffic * whole / kind.host.bandwidth
            copies = copied / kind.gpu.copy_rate + fetches
            seconds = max(seconds, work + copies + updates + moved)
        return seconds

    def at(self, step: float) -> Found | None:
        """Loads and shares that keep to the step."""
        even = self._problem.model.parameters / self._problem.cluster.num_ranks
        picked: dict[_Kind, Load] = {}
        for kind in dict.fromkeys(self._kinds):
            columns = kind.columns
            shards = largest_shards(self._problem, kind.host, kind.gpu, columns, step).max(axis=1)
            enough = np.flatnonzero(shards >= even * (1.0 - _ROUNDING))
            if not len(enough):
                return None
            # Of those that can own their part, the one that leaves the host most.
            offloaded = columns.offloaded[enough]
            least = enough[offloaded == offloaded.min()]
            picked[kind] = kind.menu[int(least[columns.room[least].argmax()])]
        loads = [picked[kind] for kind in self._kinds]
        found = settle(self._problem, loads, step, even=True)
        return found if found is not None and found.step <= step * (1.0 + TOLERANCE) else None


def _missing(problem: PlanProblem, menus: Sequence[Sequence[Load]]) -> Infeasible:
    """What the roomiest loads lack for even shards."""
    even = problem.model.parameters / problem.cluster.num_ranks

    def left_for_host(work: Load) -> float:
        """Bytes that the rank's host must hold."""
        on_cpu = max(0.0, even - shard_that_fits(problem, work, 1.0))
        state = on_cpu * problem.host_state_bytes
        return state + problem.host_weight_bytes * even + work.offloaded

    works = [min(menu, key=lambda work: (work.room < 0.0, left_for_host(work))) for menu in menus]
    for rank, ((_, gpu), work) in enumerate(zip(problem.cluster.ranks, works, strict=True)):
        if work.room < 0.0:
            missing = -work.room / _GIB
            return Infeasible(
                f"out of memory: rank {rank} ({gpu.name}) lacks {missing:.2f} GiB for "
                f"{work.batch} samples, {work.microbatch} at once, and the training copy",
                missing,
                rank,
            )
    first = 0
    for host in problem.cluster.hosts:
        rest = sum(left_for_host(work) for work in works[first : first + len(host.gpus)])
        first += len(host.gpus)
        if rest > host.memory_bytes:
            missing = (rest - host.memory_bytes) / _GIB
            return Infeasible(
                f"out of memory: host {host.name} and its GPUs lack {missing:.2f} GiB for an even "
                "share of the state",
                missing,
            )
    return Infeasible("out of memory: an even share of the state fits only if layers are split")
