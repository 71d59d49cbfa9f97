"""The walk through steps: against the walk that training solves k with, and by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hytrain.placement.costs import LayerCosts, StepCosts
from hytrain.placement.prediction import predict
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, Load, load
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.step_simulator import StepSimulator

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
        Cluster((host,), line, line, 1.0),
        model,
        64,
        activations=("store", "keep"),
        clipped_share=clipped_share,
    )


def works(given: PlanProblem, *batches: int, micro: int = 1) -> list[Load]:
    collectives = Collectives.of(given, even=True)
    ranks = zip(given.cluster.ranks, batches, strict=True)
    return [load(given, one, collectives, b, min(b, micro), "store") for (_, one), b in ranks]


def step(given: PlanProblem, loads: list[Load], *shares: Share) -> float:
    return StepSimulator(given, loads, shares, even=True).seconds()


# No round numbers: where a gradient becomes final in the very moment in which the worker has time,
# the two walks, which count from other moments, may round to either side and take another layer.
@settings(max_examples=300, deadline=None)
@given(
    ms=st.floats(0.5, 20.0),
    rate=st.sampled_from((2.0173e8, 1.0291e9, 5.0377e9, 1.0411e11)),
    copy_rate=st.sampled_from((1.0173e9, 2.0291e10, 1.0377e12)),
    gpu_layers=st.integers(0, LAYERS),
    clipped_share=st.sampled_from((0.0, 0.5, 1.0)),
)
def test_one_rank_and_one_micro_batch_are_as_training_predicts_them(
    ms: float, rate: float, copy_rate: float, gpu_layers: int, clipped_share: float
) -> None:
    given = problem(gpu(ms, copy_rate=copy_rate), rate=rate, clipped_share=clipped_share)
    size = given.model.parameters // LAYERS
    copy = 2 * size / copy_rate
    update = size / rate
    layer = LayerCosts(
        name="x",
        parameters=size,
        forward=ms / 1e3,
        backward=2 * ms / 1e3,
        to_host=copy,
        cpu_update=update,
        # The planner's first job of a clipped step previews as well, in vain.
        cpu_commit=update,
        cpu_preview=update * 0.8,
        to_device=copy,
        gpu_update=size / 1e11,
    )
    costs = StepCosts(
        layers=(layer,) * LAYERS,
        tail=0.0,
        between=0.005,
        clipped_share=clipped_share,
        chunk_elements=16 * 1024 * 1024,
    )
    found = step(given, works(given, 1), Share(1.0, gpu_layers))
    (expected,) = predict(costs, gpu_layers=[gpu_layers]).step_seconds
    # The same machine and the same jobs in the same order: only sums are rounded otherwise.
    assert found == pytest.approx(expected, rel=1e-9)


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
    loads = works(given, 1, 1)
    shares = [Share(0.5, 0), Share(0.5, 0)]
    steps = StepSimulator(given, loads, shares, even=True)
    numbers = steps.worthwhile_layers([LAYERS, 3])
    assert numbers[0] > numbers[1] == 3
    assert steps.seconds(numbers) < steps.seconds()
    # Nobody is late: nothing is gained.
    quick = problem(*[gpu(20.0, copy_rate=1e13)] * 2, rate=1e12)
    steps = StepSimulator(quick, works(quick, 1, 1), shares, even=True)
    assert steps.worthwhile_layers([LAYERS, LAYERS]) == [0, 0]


def test_fewest_of_equally_good_numbers_of_gpu_layers_are_best() -> None:
    given = problem(gpu(2.0, update_rate=1e13), rate=5e8)
    steps = StepSimulator(given, works(given, 1), [Share(1.0, 0)], even=True)
    (number,) = steps.worthwhile_layers([LAYERS])
    best = min(steps.seconds([other]) for other in range(LAYERS + 1))
    assert steps.seconds([number]) <= best * 1.004
    assert all(steps.seconds([fewer]) > best * 1.003 for fewer in range(number))


def test_equal_ranks_are_walked_once_and_come_out_alike() -> None:
    rng = random.Random(3)
    given = problem(*[gpu(rng.choice((1.0, 3.0))) for _ in range(8)])
    loads = works(given, *[2] * 8)
    shares = [Share(0.125, 4)] * 8
    one_by_one = StepSimulator(given, loads, shares, even=True)
    doubled = replace(given, cluster=replace(given.cluster, hosts=given.cluster.hosts * 2))
    again = StepSimulator(doubled, loads * 2, shares * 2, even=True)
    assert again.seconds() == pytest.approx(one_by_one.seconds())
