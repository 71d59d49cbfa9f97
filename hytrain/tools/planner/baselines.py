"""What a plan is compared with: the even split, and samples dealt by speed with even shards.

Both are given the best that their rule allows by the same cost model: micro-batches, activation
policies and numbers of GPU layers are searched. *Even*: all ranks do exactly the same. *By speed*:
each rank's samples are proportional to its speed, its micro-batch is its own, shards are even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.accumulation_modes import best_mode, some_rounds
from hytrain.tools.planner.arrays import Bools
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    Workload,
    WorkloadMaker,
    fits_rounds,
    largest_shards,
    longest_step,
    shard_that_fits,
)
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import TOLERANCE, Found, Plan, settle, to_plan
from hytrain.tools.planner.step_program import whole_parts

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
        return _of_each_mode(problem, even_split)
    num_ranks = problem.cluster.num_ranks
    if problem.batch < num_ranks:
        return Infeasible(f"a batch of {problem.batch} cannot be split evenly over {num_ranks}")
    batches = [(problem.batch + rank) // num_ranks for rank in reversed(range(num_ranks))]
    make = WorkloadMaker(problem, Collectives.of(problem, even=True))
    gpus = [gpu for _, gpu in problem.cluster.ranks]
    common = set.intersection(*(set(gpu.micro_batches(batches[0])) for gpu in dict.fromkeys(gpus)))
    tried = [
        [
            make.of(gpu, batch, min(size, batch), policy)
            for gpu, batch in zip(gpus, batches, strict=True)
        ]
        for policy in problem.activations
        for size in sorted(common)
        if all(fits_rounds(problem, batch, min(size, batch)) for batch in batches)
    ]
    if not tried:
        return Infeasible(f"an even split does not make {problem.rounds} rounds")
    # The smallest room decides.
    roomiest = max(tried, key=lambda workloads: min(work.room for work in workloads))
    return _best_of(problem, tried) or _missing(problem, [[work] for work in roomiest])


def samples_by_speed(problem: PlanProblem) -> Plan | Infeasible:
    """Each rank computes samples by its speed; all own equally much."""
    if problem.needs_rounds:
        return _of_each_mode(problem, samples_by_speed)
    make = WorkloadMaker(problem, Collectives.of(problem, even=True))
    speeds = [_speed(problem, make, gpu) for _, gpu in problem.cluster.ranks]
    if max(speeds) == 0.0:
        return Infeasible("no rank has room for a single sample")
    menus: list[list[Workload]] = []
    chosen: list[list[Workload]] = []
    known: dict[tuple[int, int, int], list[Workload]] = {}
    batches = whole_parts(speeds, problem.batch)
    for (host, gpu), batch in zip(problem.cluster.ranks, batches, strict=True):
        menu = [
            make.of(gpu, batch, size, policy)
            for policy in problem.activations
            for size in (gpu.micro_batches(batch) if batch else range(1))
            if fits_rounds(problem, batch, size)
        ]
        if not menu:
            return Infeasible(f"{batch} samples of {gpu.name} do not make {problem.rounds} rounds")
        menus.append(menu)
        key = id(host), id(gpu), batch
        if key not in known:
            known[key] = _of_even_shard(problem, host, gpu, menu)
        chosen.append(known[key])
    return _best_of(problem, zip(*chosen, strict=True)) or _missing(problem, menus)


def allowed_by_speed(problem: PlanProblem) -> Plan | None:
    """Samples by speed, where that fits and no rank is idle that must not be."""
    found = samples_by_speed(problem)
    if isinstance(found, Infeasible):
        return None
    is_allowed = problem.allow_idle or all(rank.batch_size for rank in found.ranks)
    return found if is_allowed else None


def _of_each_mode(
    problem: PlanProblem, rule: Callable[[PlanProblem], Plan | Infeasible]
) -> Plan | Infeasible:
    return best_mode(problem, lambda one, _: rule(one), lambda one: some_rounds(one, rule))


def _best_of(problem: PlanProblem, tried: Iterable[Sequence[Workload]]) -> Plan | None:
    """Of workloads of all ranks those with the shortest step, all shards even; None: none fit."""
    best: Found | None = None
    pairs = [(max(work.compute for work in workloads), workloads) for workloads in tried]
    for least, workloads in sorted(pairs, key=lambda pair: pair[0]):
        if best is None or least < best.step:
            found = settle(problem, workloads, least, even=True)
            if found is not None and (best is None or found.step < best.step):
                best = found
    return None if best is None else to_plan(problem, best, best.step)


def own_speeds(problem: PlanProblem) -> list[float]:
    """Samples/s that each rank computes for itself at its best micro-batch, updates left out."""
    alone = WorkloadMaker(problem, Collectives(0.0, 0.0))
    return [_speed(problem, alone, gpu) for _, gpu in problem.cluster.ranks]


def _speed(problem: PlanProblem, make: WorkloadMaker, gpu: GpuProfile) -> float:
    """Samples a second at the best micro-batch that has room; 0 where none has."""
    best = 0.0
    for policy in problem.activations:
        for size in gpu.micro_batches(problem.batch):
            work = make.of(gpu, size, size, policy)
            if work.room < 0.0:
                break
            best = max(best, size / work.compute)
    return best


def _of_even_shard(
    problem: PlanProblem, host: Host, gpu: GpuProfile, menu: list[Workload]
) -> list[Workload]:
    """The workload that can own an even part in the shortest step, and a frugal one.

    The latter is the roomiest of those with the fewest bytes of activations on the host.
    """
    part = problem.model.parameters / problem.cluster.num_ranks * (1.0 - _ROUNDING)

    def able(step: float) -> Bools:
        return largest_shards(problem, host, gpu, menu, step).max(axis=1) >= part

    low, high = 0.0, longest_step(problem, host, gpu, menu)
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if able(middle).any() else (middle, high)
    fastest = menu[int(able(high).argmax())]
    return [fastest, min(menu, key=lambda work: (work.room < 0.0, work.offloaded, -work.room))]


def _missing(problem: PlanProblem, menus: Sequence[Sequence[Workload]]) -> Infeasible:
    """What the roomiest workloads lack for even shards."""
    even = problem.model.parameters / problem.cluster.num_ranks

    def left_for_host(work: Workload) -> float:
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
    for host, ranks in problem.cluster.host_ranks:
        rest = sum(left_for_host(works[rank]) for rank in ranks)
        if rest > host.memory_bytes:
            missing = (rest - host.memory_bytes) / _GIB
            return Infeasible(
                f"out of memory: host {host.name} and its GPUs lack {missing:.2f} GiB for an even "
                "share of the state",
                missing,
            )
    return Infeasible("out of memory: an even share of the state fits only if layers are split")
