"""Small random clusters, and the best plan for them by trying everything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from hytrain.formats.policies import LAYER_MAJOR, Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, Workload, fits_rounds, workload
from hytrain.tools.planner.curves import FREE, Table
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.result import Plan

PARAMETERS = 1_000_000_000
GB = 10**9
_POLICIES: tuple[tuple[Activations, ...], ...] = (
    ("keep",),
    ("keep", "offload"),
    ("store",),
    ("store", "recompute"),
    ("store", "keep"),
    ("recompute", "keep", "offload"),
)


def gpu(name: str, gigabytes: int, ms: float) -> GpuProfile:
    """A GPU that takes some milliseconds for a layer's forward of one sample."""
    return GpuProfile(
        name=name,
        memory_bytes=gigabytes * GB,
        forward_ms=Table(((1.0, ms),)),
        backward_ms=Table(((1.0, 2.0 * ms),)),
        peak_bytes=Table(((1.0, 1e9), (2.0, 1.5e9))),
        idle_bytes=GB // 2,
        update_rate=1e11,
        copy_rate=2e10,
    )


def host(*gpus: GpuProfile, gigabytes: int = 256, **changes: Any) -> Host:
    """Of 16 cores."""
    whole = Host(
        name="host",
        gpus=gpus,
        cores=16,
        memory_bytes=gigabytes * GB,
        bandwidth=1e11,
        update_rates=Table(((1.0, 4e8), (16.0, 4e9))),
    )
    return replace(whole, **changes)


def problem(*hosts: Host, batch: int = 12, **changes: Any) -> PlanProblem:
    """3 G parameters in 24 layers."""
    collective = Table(((1e6, 0.1), (1e9, 20.0)))
    cluster = Cluster(hosts, collective, collective)
    whole = PlanProblem(cluster, Model("m", 24, 3 * GB, 4 * 2**20), batch)
    return replace(whole, **changes)


def with_hosts(given: PlanProblem, *hosts: Host) -> PlanProblem:
    """The problem on other hosts."""
    return replace(given, cluster=replace(given.cluster, hosts=hosts))


def planned(
    given: PlanProblem, solve: Callable[[PlanProblem], Plan | Infeasible] = make_plan
) -> Plan:
    """The plan of a problem that has one."""
    plan = solve(given)
    assert isinstance(plan, Plan), plan
    return plan


def check_plan(given: PlanProblem, plan: Plan) -> None:
    """All samples and all state are dealt, and nobody exceeds memory or the step."""
    assert sum(rank.batch_size for rank in plan.ranks) == given.batch
    assert sum(rank.shard_fraction for rank in plan.ranks) == pytest.approx(1.0)
    names = [(one.name, device.name) for one, device in given.cluster.ranks]
    assert [(rank.host, rank.device) for rank in plan.ranks] == names
    by_host: dict[str, float] = {}
    for rank, (one, device) in zip(plan.ranks, given.cluster.ranks, strict=True):
        assert rank.batch_size >= (0 if given.allow_idle else 1)
        assert 0 <= rank.microbatch_size <= rank.batch_size
        assert (rank.microbatch_size == 0) == (rank.batch_size == 0)
        assert 0.0 <= rank.shard_fraction <= 1.0
        assert 0 <= rank.gpu_layers <= given.model.num_layers
        assert rank.gpu_bytes <= device.memory_bytes * (1.0 + 1e-9)
        by_host[one.name] = by_host.get(one.name, 0.0) + rank.host_bytes
    for one in given.cluster.hosts:
        assert by_host[one.name] <= one.memory_bytes * (1.0 + 1e-9) + 1.0
    assert plan.lower_bound <= plan.step_seconds
    # The finer model has all that the roofline bounds have, and what they leave out.
    assert plan.predicted_seconds >= plan.lower_bound * (1.0 - 1e-9)
    assert plan.gap >= plan.step_seconds / plan.lower_bound - 1.0
    assert plan.predicted_seconds >= max(rank.step_seconds for rank in plan.ranks)


@st.composite
def _gpus(draw: st.DrawFn, name: str) -> GpuProfile:
    ms = draw(st.integers(1, 40))
    return GpuProfile(
        name=name,
        memory_bytes=draw(st.integers(1, 24)) * 10**9,
        forward_ms=Table(((1.0, ms), (2.0, ms * draw(st.sampled_from((1.2, 1.6, 2.0)))))),
        backward_ms=Table(((1.0, 2.0 * ms), (2.0, 4.0 * ms))),
        peak_bytes=Table(((1.0, 5e8), (2.0, 5e8 + draw(st.integers(1, 20)) * 1e8))),
        idle_bytes=draw(st.sampled_from((0, 5 * 10**8))),
        update_rate=draw(st.sampled_from((5e9, 1e11))),
        copy_rate=draw(st.sampled_from((5e9, 5e10))),
        outside_ms=draw(st.sampled_from((FREE, Table(((1.0, 3.0),))))),
        recompute_ms=draw(st.sampled_from((None, Table(((1.0, 5.0),))))),
        stored_bytes=Table(((1.0, 1e9), (2.0, draw(st.integers(10, 30)) * 1e8))),
        sizes=draw(st.sampled_from((None, (1, 2), (1, 3)))),
        accumulation_ms=Table(
            draw(st.sampled_from((((1.0, 0.0), (2.0, 4.0), (3.0, 4.0)), ((1.0, 5.0), (2.0, 5.0)))))
        ),
        fetch_rate=draw(st.sampled_from((None, 8e10))),
    )


@st.composite
def clusters(draw: st.DrawFn, most_ranks: int) -> Cluster:
    types = [draw(_gpus("x")), draw(_gpus("y"))]
    names = draw(st.lists(st.sampled_from((0, 1)), min_size=1, max_size=most_ranks))
    cut = draw(st.integers(0, len(names) - 1))
    hosts = [
        Host(
            name=f"host{number}",
            gpus=tuple(types[kind] for kind in kinds),
            cores=8,
            memory_bytes=draw(st.sampled_from((0, 4, 8, 16, 64))) * 10**9,
            bandwidth=draw(st.sampled_from((2e10, 1e11))),
            update_rates=Table(((8.0, draw(st.sampled_from((5e8, 5e9)))),)),
        )
        for number, kinds in enumerate((names[:cut], names[cut:]))
        if kinds
    ]
    return Cluster(
        hosts=tuple(hosts),
        all_gather_ms=Table(((1.0, draw(st.sampled_from((0.0, 1e-8)))),)),
        reduce_scatter_ms=Table(((1.0, draw(st.sampled_from((0.0, 2e-8)))),)),
        contention=draw(st.sampled_from((0.0, 1.0))),
    )


@st.composite
def plan_problems(draw: st.DrawFn, most_ranks: int, most_batch: int) -> PlanProblem:
    stage = draw(st.sampled_from((2, 3)))
    activations = draw(st.sampled_from(_POLICIES))
    # One mode of some rounds, or both with whatever number; layer by layer there are none.
    is_mixed = len({policy in LAYER_MAJOR for policy in activations}) > 1
    rounds = None
    if stage == 3 and not is_mixed:
        rounds = draw(st.sampled_from((None, None, 1, 2)))
    return PlanProblem(
        cluster=draw(clusters(most_ranks)),
        model=Model("tiny", draw(st.integers(1, 3)), PARAMETERS, draw(st.sampled_from((0, 10**8)))),
        batch=draw(st.integers(1, most_batch)),
        stage=stage,
        rounds=rounds,
        activations=activations,
        gradient_bytes=draw(st.sampled_from((0, 2))),
        offload_param=stage == 3 and draw(st.booleans()),
        allow_idle=draw(st.booleans()),
    )


# -- the best plan, by trying everything -------------------------------------------------------


def best_step(problem: PlanProblem) -> float | None:
    """The shortest step that any workloads, layers and shards allow, to a millionth."""
    if not problem.needs_rounds:
        return _best_step(problem)
    # One by one all ranks make as many micro-batches; layer by layer as many as each likes.
    policies = problem.activations
    by_layer = tuple(policy for policy in policies if policy in LAYER_MAJOR)
    found = [_best_step(replace(problem, activations=by_layer))] if by_layer else []
    for policy in set(policies) - set(by_layer):
        for rounds in range(1, problem.batch + 1):
            found.append(_best_step(replace(problem, activations=(policy,), rounds=rounds)))
    return min((step for step in found if step is not None), default=None)


def _best_step(problem: PlanProblem) -> float | None:
    best: float | None = None
    for even in (True, False):
        for workloads in _all_workloads(problem, even=even):
            numbers = range(problem.model.num_layers + 1)
            for layers in itertools.product(numbers, repeat=len(workloads)):
                high = 1e6 if best is None else best * (1.0 - 1e-6)
                if not _possible(problem, workloads, layers, high, even=even):
                    continue
                low = 0.0
                while high - low > 1e-7 * high:
                    middle = (low + high) / 2.0
                    if _possible(problem, workloads, layers, middle, even=even):
                        high = middle
                    else:
                        low = middle
                best = high
    return best


def _sizes(problem: PlanProblem, gpu: GpuProfile, batch: int) -> list[int]:
    """Micro-batches; all at once is one, which may be of any size below the largest.

    So may all where ranks make as many.
    """
    largest = problem.batch if gpu.sizes is None else gpu.sizes[-1]
    if problem.rounds is not None:
        return list(range(1, min(batch, largest) + 1))
    return sorted({*gpu.micro_sizes(batch), min(batch, largest)} - {0})


def _all_workloads(problem: PlanProblem, *, even: bool) -> Iterator[tuple[Workload, ...]]:
    collectives = Collectives.of(problem, even=even)
    ranks = problem.cluster.ranks
    least = 0 if problem.allow_idle else 1
    menus: list[list[list[Workload]]] = []
    for _, gpu in ranks:
        by_batch = [
            [
                workload(problem, gpu, collectives, batch, size, policy)
                for size in _sizes(problem, gpu, batch)
                for policy in problem.activations
                if fits_rounds(problem, batch, size)
            ]
            for batch in range(problem.batch + 1)
        ]
        by_batch[0] = [workload(problem, gpu, collectives, 0, 0, "keep")]
        menus.append([[one for one in workloads if one.room >= 0.0] for workloads in by_batch])
    for batches in itertools.product(range(least, problem.batch + 1), repeat=len(ranks)):
        if sum(batches) == problem.batch:
            chosen = [menu[batch] for menu, batch in zip(menus, batches, strict=True)]
            yield from itertools.product(*chosen)


def _possible(
    problem: PlanProblem,
    workloads: Sequence[Workload],
    layers: Sequence[int],
    step: float,
    *,
    even: bool,
) -> bool:
    num_ranks = len(workloads)
    total = 0.0
    first = 0
    for host in problem.cluster.hosts:
        ranks = range(first, first + len(host.gpus))
        first += len(host.gpus)
        memory = float(host.memory_bytes)
        moved = step * host.bandwidth
        # Of a parameter of a shard: its copy in memory, written once, read for each gather.
        weights = 2.0 if problem.offload_param else 0.0
        gathers = 2 * (problem.rounds or 1)
        offers: list[tuple[float, float]] = []
        for rank, gpu in zip(ranks, host.gpus, strict=True):
            room = _largest(problem, host, gpu, workloads[rank], layers[rank], step)
            if room < (1.0 / num_ranks if even else 0.0) * (1.0 - 1e-12):
                return False
            memory -= workloads[rank].offloaded
            moved -= 2.0 * workloads[rank].offloaded
            on_host = 1.0 - layers[rank] / problem.model.num_layers
            offers.append((on_host, 1.0 / num_ranks if even else room))
        memory, moved = memory / problem.model.parameters, moved / problem.model.parameters
        if min(memory, moved) < 0.0:
            return False
        for on_host, room in sorted(offers):
            held = problem.host_state_bytes * on_host + weights
            # A new copy of a CPU-placed parameter is neither staged nor sent.
            each = (problem.update_bytes - 2.0 * weights) * on_host + (gathers + 1) * weights
            taken = min(room, memory / held, moved / each) if held > 0.0 else room
            if even and taken < room * (1.0 - 1e-12):
                return False
            memory = max(0.0, memory - taken * held)
            moved = max(0.0, moved - taken * each)
            total += taken
    return total >= 1.0 - 1e-12


def _largest(
    problem: PlanProblem, host: Host, gpu: GpuProfile, work: Workload, gpu_layers: int, step: float
) -> float:
    """The largest shard, of the model; negative where the workload itself takes longer."""
    if step < work.compute or step * gpu.copy_rate < work.offloaded:
        return -1.0
    whole = float(problem.model.parameters)
    on_gpu = gpu_layers / problem.model.num_layers
    on_cpu = 1.0 - on_gpu
    room = math.inf
    each = 12.0 * on_gpu + problem.sharded_bytes
    # Their gradients wait at the end, unless the whole shard's are counted already.
    without_gradients = 2 if problem.stage == 3 and not problem.offload_param else 0
    at_end = each + (2.0 * on_gpu if problem.sharded_bytes == without_gradients else 0.0)
    if each > 0.0:
        room = min(room, work.room / each)
    if at_end > 0.0:
        room = min(room, work.end_room / at_end)
    if on_gpu > 0.0:
        room = min(room, (step - work.compute) * gpu.update_rate / on_gpu)
    for line in work.fetches:  # each grows with the shard
        seconds = line.slope + on_gpu / gpu.update_rate
        room = min(room, (step - work.compute + line.hidden) / seconds)
    if on_cpu > 0.0:
        window = max(0.0, step - work.startup)
        rate = host.update_rates.at(host.cores / len(host.gpus))
        room = min(room, window * rate / on_cpu, window * gpu.copy_rate / 2.0 / on_cpu)
        room = min(room, (step * gpu.copy_rate - work.offloaded) / 2.0 / on_cpu)
    return room / whole
