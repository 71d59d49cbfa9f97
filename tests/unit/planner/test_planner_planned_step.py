"""The steps of a plan, by hand; GPU layers that shorten them; what clipped steps make of a plan."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from planner_clusters import planned

from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, Workload, workload
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.plan_report import plan_text
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import Model, PlanProblem

LAYERS = 12


def gpu(ms: float, *, update_rate: float = 1e11, copy_rate: float = 2e10) -> GpuProfile:
    return GpuProfile(
        name=f"{ms} ms",
        memory_bytes=80 * 10**9,
        forward_ms=Table(((1.0, ms),)),
        backward_ms=Table(((1.0, 2.0 * ms),)),
        peak_bytes=Table(((1.0, 1e9),)),
        idle_bytes=10**9,
        update_rate=update_rate,
        copy_rate=copy_rate,
        outside_ms=Table(((1.0, 5.0),)),
        stored_bytes=Table(((1.0, 1e9),)),
    )


def problem(
    *gpus: GpuProfile, rate: float = 1e9, collective_ms: float = 0.0, clipped_share: float = 0.0
) -> PlanProblem:
    host = Host("h", gpus, len(gpus), 2**40, 1e13, Table(((1.0, rate),)))
    line = Table(((1e8, collective_ms), (2e8, collective_ms)))
    model = Model("m", LAYERS, LAYERS * 50_000_000)
    return PlanProblem(
        Cluster((host,), line, line, (1.0, 1.0)),
        model,
        64,
        activations=("store", "keep"),
        clipped_share=clipped_share,
    )


def works(given: PlanProblem, *batches: int, micro: int = 1) -> list[Workload]:
    collectives = Collectives.of(given, even=True)
    ranks = zip(given.cluster.ranks, batches, strict=True)
    return [workload(given, one, collectives, b, min(b, micro), "store") for (_, one), b in ranks]


def step(given: PlanProblem, workloads: list[Workload], *shares: Share) -> float:
    return PlannedStep(given, workloads, shares, even=True).seconds()


def test_further_micro_batches_only_add_their_time() -> None:
    given = problem(gpu(2.0), rate=1e12)
    once, thrice = works(given, 1), works(given, 3)
    share = Share(1.0, LAYERS)
    added = step(given, thrice, share) - step(given, once, share)
    assert added == pytest.approx(2 * (LAYERS * 0.006 + 0.005))


def test_the_slowest_backward_and_the_slowest_worker_hold_up_everybody() -> None:
    fast, slow = gpu(1.0), gpu(4.0)
    together = problem(fast, slow, rate=1e12)
    alone = problem(slow, rate=1e12)
    all_gpu = Share(0.5, LAYERS)
    both = step(together, works(together, 1, 1), all_gpu, all_gpu)
    assert both == pytest.approx(step(alone, works(alone, 1), all_gpu))
    # Only the fast rank has state for its slow worker: the other one's forward waits for it.
    starved = problem(fast, slow, rate=2e8)
    held_up = step(starved, works(starved, 1, 1), Share(0.5, 0), all_gpu)
    assert held_up > 1.5 * both


def test_a_rank_without_samples_costs_nothing_but_its_updates() -> None:
    given = problem(gpu(4.0), gpu(4.0), rate=2e8)
    idle = works(given, 2, 0)
    nothing = step(given, idle, Share(1.0, LAYERS), Share(0.0, LAYERS))
    alone = problem(gpu(4.0), rate=2e8)
    assert nothing == pytest.approx(step(alone, works(alone, 2), Share(1.0, LAYERS)))
    assert step(given, idle, Share(0.5, LAYERS), Share(0.5, 0)) > 1.5 * nothing


def test_collectives_hide_under_compute_but_for_the_first_and_the_last() -> None:
    # Of each layer 2 ms, under forward of 4 ms and backward of 8.
    ranks = (gpu(4.0, update_rate=1e18),) * 2
    free, costly = problem(*ranks), problem(*ranks, collective_ms=2.0)
    share = Share(0.5, LAYERS)
    extra = step(costly, works(costly, 1, 1), share, share)
    extra -= step(free, works(free, 1, 1), share, share)
    assert extra == pytest.approx(0.002 + 0.002)
    # 20 ms do not: one after another they are as long as the step.
    slow = problem(*ranks, collective_ms=20.0)
    assert step(slow, works(slow, 1, 1), share, share) > 2 * LAYERS * 0.020


def test_more_gpu_layers_are_taken_where_the_worker_is_late() -> None:
    given = problem(gpu(2.0), gpu(2.0), rate=5e8)
    workloads = works(given, 1, 1)
    shares = [Share(0.5, 0), Share(0.5, 0)]
    steps = PlannedStep(given, workloads, shares, even=True)
    numbers = steps.worthwhile_layers([LAYERS, 3])
    assert numbers[0] > numbers[1] == 3
    assert steps.seconds(numbers) < steps.seconds()
    # Nobody is late: nothing is gained.
    quick = problem(*[gpu(20.0, copy_rate=1e13)] * 2, rate=1e12)
    steps = PlannedStep(quick, works(quick, 1, 1), shares, even=True)
    assert steps.worthwhile_layers([LAYERS, LAYERS]) == [0, 0]


def test_fewest_of_equally_good_numbers_of_gpu_layers_are_best() -> None:
    given = problem(gpu(2.0, update_rate=1e13), rate=5e8)
    steps = PlannedStep(given, works(given, 1), [Share(1.0, 0)], even=True)
    (number,) = steps.worthwhile_layers([LAYERS])
    best = min(steps.seconds([other]) for other in range(LAYERS + 1))
    assert steps.seconds([number]) <= best * 1.004
    assert all(steps.seconds([fewer]) > best * 1.003 for fewer in range(number))


def test_layers_outside_of_the_blocks_are_updated_for_themselves() -> None:
    """A rank's worker has the first layer's gradient last, and forward waits for it first."""
    given = problem(gpu(2.0), rate=2e9)
    embeddings = 100_000_000
    model = replace(given.model, parameters=given.model.parameters + embeddings)
    outside = replace(given, model=replace(model, outside=(embeddings, 0)))
    assert outside.model.num_updates == LAYERS + 1
    assert outside.model.gpu_part(1) == embeddings / model.parameters
    assert outside.model.gpu_part(LAYERS + 1) == 1.0
    workloads = works(outside, 1)
    on_cpu, first_on_gpu = (step(outside, workloads, Share(1.0, number)) for number in (0, 1))
    blocks_alone = step(given, works(given, 1), Share(1.0, 0))
    assert first_on_gpu == pytest.approx(blocks_alone + embeddings / 1e11, rel=0.01)
    assert on_cpu > first_on_gpu + 0.8 * embeddings / 2e9


# -- what plans make of it ---------------------------------------------------------------------


def two_gpus(
    gigabytes: int = 139, rate: float = 2e9, clipped_share: float = 1.0, batch: int = 48
) -> PlanProblem:
    """A model of 3 B parameters; backward of a rank hides the updates of an unclipped step."""

    def device(name: str, ms: float) -> GpuProfile:
        return GpuProfile(
            name=name,
            memory_bytes=gigabytes * 10**9,
            forward_ms=Table(((1.0, ms),)),
            backward_ms=Table(((1.0, 2.0 * ms),)),
            peak_bytes=Table(((1.0, 2e9), (2.0, 3e9))),
            idle_bytes=10**9,
            update_rate=1.2e11,
            copy_rate=4e10,
            stored_bytes=Table(((1.0, 2e9), (2.0, 3e9))),
            sizes=(1, 2, 4, 8),
        )

    gpus = (device("fast", 0.5), device("slow", 1.0))
    host = Host("h", gpus, 32, 256 * 10**9, 1.7e11, Table(((16.0, rate),)))
    line = Table(((1e8, 0.4), (2e8, 0.8)))
    return PlanProblem(
        Cluster((host,), line, line),
        Model("m", 24, 3 * 10**9),
        batch,
        activations=("store",),
        clipped_share=clipped_share,
    )


def steps_of(problem: PlanProblem) -> PlannedStep:
    collectives = Collectives.of(problem, even=True)
    workloads = [
        workload(problem, one, collectives, batch, 8, "store")
        for (_, one), batch in zip(problem.cluster.ranks, (32, 16), strict=True)
    ]
    return PlannedStep(problem, workloads, [Share(0.5, 0)] * 2, even=True)


def test_more_layers_are_updated_on_the_gpu_where_more_steps_are_clipped() -> None:
    shares = (0.0, 0.25, 0.5, 1.0)
    chosen = [
        steps_of(two_gpus(clipped_share=share)).worthwhile_layers([24, 24]) for share in shares
    ]
    for fewer, more in itertools.pairwise(chosen):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))
    assert sum(chosen[-1]) > sum(chosen[0])


def test_never_more_layers_than_have_room() -> None:
    for gigabytes in (14, 24, 40):
        for share in (0.0, 1.0):
            problem = two_gpus(gigabytes, clipped_share=share)
            plan = planned(problem)
            for rank, (_, device) in zip(plan.ranks, problem.cluster.ranks, strict=True):
                assert rank.gpu_bytes <= device.memory_bytes


def test_a_plan_with_gpu_memory_left_hides_clipped_steps_too() -> None:
    roomy = planned(two_gpus())
    careless = planned(two_gpus(clipped_share=0.0))
    layers = [sum(rank.gpu_layers for rank in plan.ranks) for plan in (roomy, careless)]
    assert layers[0] > layers[1]
    assert roomy.clipped_seconds <= careless.unclipped_seconds * 1.02
    assert roomy.clipped_seconds < careless.clipped_seconds * 0.98
    # For what it was planned for, each is the better one.
    assert careless.predicted_seconds == careless.unclipped_seconds
    assert roomy.predicted_seconds == roomy.clipped_seconds
    # The bound is of unclipped steps, and of all plans.
    for plan in (roomy, careless):
        assert plan.lower_bound <= plan.unclipped_seconds


def test_the_table_says_what_clipping_costs_where_it_does() -> None:
    poor = two_gpus(gigabytes=16)
    plan = planned(poor)
    assert plan.clipped_seconds > 1.01 * plan.unclipped_seconds
    (line,) = [line for line in plan_text(poor, plan).splitlines() if "clipped" in line]
    assert line == (
        f"in this plan a clipped step takes {1e3 * plan.clipped_seconds:.1f} ms, an "
        f"unclipped one {1e3 * plan.unclipped_seconds:.1f}; predicted for 100% clipped"
    )
    same = replace(plan, clipped_seconds=1.005 * plan.unclipped_seconds)
    assert "clipped" not in plan_text(poor, same)


@pytest.mark.parametrize("ranks", [1, 2])
def test_as_few_layers_are_late_as_the_hosts_memory_asks_for(ranks: int) -> None:
    """Two bytes a parameter more for a whole master weight on the CPU; equal parts of the host."""
    given = problem(*[gpu(2.0)] * ranks, rate=1e9, clipped_share=1.0)
    workloads, shares = works(given, *[1] * ranks), [Share(1.0 / ranks, 1)] * ranks
    whole, on_cpu = PlannedStep(given, workloads, shares, even=True), LAYERS - 1
    assert whole.late_layers == (0,) * ranks
    size = 50_000_000
    for late in range(on_cpu + 1):
        memory = 12 * on_cpu * size + 2 * (on_cpu - late) * size
        (host,) = given.cluster.hosts
        cluster = replace(given.cluster, hosts=(replace(host, memory_bytes=memory),))
        split = replace(given, cluster=cluster, splits_master=True, host_state_bytes=12)
        steps = PlannedStep(split, workloads, shares, even=True)
        assert steps.late_layers == (late,) * ranks
        if late == 0:
            assert steps.seconds() == whole.seconds()
    # An update that begins after backward is waited for, here; before, backward hides a part.
    assert steps.seconds() > whole.seconds()
