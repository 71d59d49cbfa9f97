"""What a plan is compared with: the even split, and samples dealt by speed with even shards.

Both are given the best that their rule allows by the same cost model: micro-batches, activation
policies and numbers of GPU layers are searched. *Even*: all ranks do exactly the same. *By speed*:
each rank's samples are proportional to its speed, its micro-batch is its own, shards are even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.formats.policies import Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.accumulation_modes import best_mode, some_rounds
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
from hytrain.tools.planner.result import TOLERANCE, Found, Plan, settle, to_plan

_GIB = 1024**3
_ROUNDING = 1e-9


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
        # What fetches take of the host is by rounds.
        return best_mode(
            problem, lambda one, _: even_split(one), lambda one: some_rounds(one, even_split)
        )
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
        return best_mode(
            problem,
            lambda one, _: samples_by_speed(one),
            lambda one: some_rounds(one, samples_by_speed),
        )
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
