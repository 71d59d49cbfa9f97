"""What a rank's work takes, against sums by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    Workload,
    gpu_bytes,
    gpu_layers_that_fit,
    workload,
)
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.problem import Model, PlanProblem

GB = 10**9
# Of one micro-batch of 2: forward 10 ms, backward 25, a checkpoint 15, outside 7.
# (A real checkpoint computes less than a forward again; here the two must not be mistaken.)
GPU = GpuProfile(
    name="g",
    memory_bytes=40 * GB,
    forward_ms=Table(((2.0, 10.0),)),
    backward_ms=Table(((2.0, 25.0),)),
    recompute_ms=Table(((2.0, 15.0),)),
    outside_ms=Table(((2.0, 7.0),)),
    peak_bytes=Table(((1.0, 1.0 * GB), (2.0, 2.0 * GB))),
    stored_bytes=Table(((1.0, 5.0 * GB), (2.0, 9.0 * GB))),
    idle_bytes=GB // 2,
    update_rate=1e11,
    copy_rate=1e10,
)


def problem(**changes: Any) -> PlanProblem:
    host = Host("h", (GPU, GPU), 8, 64 * GB, 1e11, Table(((8.0, 1e9),)))
    cluster = Cluster((host,), Table(((1e9, 3.0),)), Table(((1e9, 30.0),)))
    whole = PlanProblem(cluster, Model("m", 4, 2 * GB, 10**8), 16, gradient_bytes=2)
    return replace(whole, **changes)


def work(policy: Activations, batch: int = 6, gather: float = 0.0, **changes: Any) -> Workload:
    return workload(problem(**changes), GPU, Collectives(gather, 0.0), batch, 2, policy)


def test_stored_activations_are_not_computed_again() -> None:
    # 3 micro-batches of 4 layers.
    assert work("store").compute == pytest.approx(4 * 3 * 0.035 + 3 * 0.007)
    assert work("recompute").compute == pytest.approx(4 * 3 * 0.050 + 3 * 0.007)
    # Layer by layer all of the forward is, whatever a checkpoint leaves out.
    assert work("keep").compute == pytest.approx(4 * 3 * 0.045 + 3 * 0.007)


def test_collectives_delay_what_is_computed_beside_them() -> None:
    # A layer's first forward takes 10 ms, its last backward 25, and what is computed again.
    beside = Collectives(0.004, 0.006, gather_delay=0.004, scatter_delay=0.006)
    seconds: dict[Activations, float] = {"store": 0.035, "recompute": 0.050, "keep": 0.045}
    for policy, once in seconds.items():
        passes = 3 * once
        found = workload(problem(), GPU, beside, 6, 2, policy)
        assert found.compute == pytest.approx(4 * (passes + 0.010) + 3 * 0.007)
    # In stage 3 each of three micro-batches gathers twice and reduces once.
    sharded = workload(problem(stage=3), GPU, beside, 6, 2, "store")
    assert sharded.compute == pytest.approx(4 * 3 * (0.035 + 2 * 0.004 + 0.006) + 3 * 0.007)


def test_adding_gradients_depends_on_the_micro_batch() -> None:
    adding = replace(GPU, accumulation_ms=Table(((1.0, 0.0), (2.0, 3.0))))
    none = Collectives(0.0, 0.0)
    for policy in ("store", "keep"):
        full = workload(problem(), adding, none, 6, 2, policy).compute
        assert full == pytest.approx(work(policy).compute + 4 * 2 * 0.003)
        # The last micro-batch, of one sample, is one of those that are added.
        less = workload(problem(), adding, none, 5, 2, policy).compute
        assert less >= work(policy, batch=5).compute + 4 * 0.003


def test_the_last_micro_batch_has_what_is_left() -> None:
    # Tables of one point are proportional: 5 samples take 5/6 of 6.
    assert work("store", batch=5).compute == pytest.approx(5 / 6 * work("store").compute)
    assert work("keep", batch=5).compute == pytest.approx(5 / 6 * work("keep").compute)
    # The worker has the last one's backward, of 1 sample, and the first one's forward, of 2.
    window = 3 * (0.010 + 0.0125)
    uneven = work("store", batch=5)
    assert uneven.startup == pytest.approx(uneven.compute - 2.5 * 0.007 - window)


def test_between_the_first_and_the_last_micro_batch_the_worker_has_nothing_to_do() -> None:
    # It has the last micro-batch's backward and the first one's forward, of 3 of 4 layers.
    one_by_one = work("recompute")
    assert one_by_one.startup == pytest.approx(one_by_one.compute - 0.021 - 3 * (0.010 + 0.040))
    layer_major = work("keep")
    assert layer_major.startup == pytest.approx(3 * 0.045)
    assert work("recompute", batch=2).startup == pytest.approx(0.050)


def test_a_gather_hides_under_what_is_computed_while_it_runs() -> None:
    # 20 ms: longer than one forward of 10 ms, shorter than three.
    assert work("keep", gather=0.020).compute == pytest.approx(work("keep").compute)
    delay = work("store", gather=0.020).compute - work("store").compute
    assert delay == pytest.approx(4 * 0.010)
    # In stage 3 every micro-batch waits for its own, in forward only: backward takes 25 ms.
    delay = work("store", gather=0.020, stage=3).compute - work("store").compute
    assert delay == pytest.approx(4 * 3 * 0.010)


def test_memory_of_each_policy() -> None:
    def used(policy: Activations, batch: int) -> float:
        return 40 * GB - 4 * GB - work(policy, batch).room

    gradients = 4 * GB
    # One micro-batch: the first backward has all gradients and one layer's activations at its end.
    assert used("store", 2) == pytest.approx(9 * GB)
    assert used("recompute", 2) == pytest.approx(2 * GB + gradients)
    # Several, one by one: gradients wait beside all that a micro-batch leaves.
    assert used("store", 4) == pytest.approx(9 * GB + gradients)
    assert used("recompute", 4) == pytest.approx(2 * GB + 2 * 4 * 0.1 * GB + gradients)
    # Layer-major: the inputs of all layers, of all samples, or none.
    assert used("keep", 16) == pytest.approx(2 * GB + 16 * 4 * 0.1 * GB)
    assert used("offload", 16) == pytest.approx(2 * GB + gradients)
    # Without samples it has one layer's zeros for the reductions.
    idle = workload(problem(), GPU, Collectives(0.0, 0.0), 0, 0, "store")
    assert idle.room == idle.end_room == pytest.approx((40 - 4 - 0.5 - 2 * 2 / 4) * GB)


def test_memory_of_micro_batches_that_are_no_whole_ones() -> None:
    def used(batch: int, microbatch: int, policy: Activations = "store") -> float:
        found = workload(problem(), GPU, Collectives(0.0, 0.0), batch, microbatch, policy)
        return 36 * GB - found.room

    # The second one, of 1 sample, is there with the first one's gradients, of 4 GB.
    assert used(3, 2) == pytest.approx(max(9, 5 + 4) * GB)
    assert used(4, 2) == pytest.approx((9 + 4) * GB)
    assert used(5, 2) == pytest.approx((9 + 4) * GB)
    # Or the first one's backward ends with more, one layer's activations and all gradients.
    assert used(3, 2, "recompute") == pytest.approx(max(2 + 4, 2 + 0.8, 1 + 0.4 + 4) * GB)


def test_gradients_that_wait_take_the_place_of_activations() -> None:
    few = work("store", 2)
    # At the end there are one layer's activations, of 2 GB, instead of all, of 9.
    assert few.end_room == pytest.approx((36 - 2) * GB)
    given = problem()
    for on_gpu in (0.5 * GB, 1.5 * GB, 2.0 * GB):
        passes, end = 9 * GB + 12 * on_gpu, 2 * GB + 14 * on_gpu
        assert gpu_bytes(given, GPU, few, on_gpu, 0.0) == pytest.approx(4 * GB + max(passes, end))
    assert gpu_bytes(given, GPU, few, GB, 0.5 * GB) == pytest.approx((4 + 9 + 12) * GB)
    # In stage 3 the shard's gradients are counted with it, wherever they are updated.
    sharded = problem(stage=3)
    few = work("store", 2, stage=3)
    assert gpu_bytes(sharded, GPU, few, GB, GB) == pytest.approx((9 + 12 + 2 * 4) * GB)
    # Layer by layer the lowest layer's inputs are there to the end.
    by_layer = work("keep", 16)
    assert by_layer.end_room == pytest.approx((36 - 2 - 16 * 0.1) * GB)


def shard_that_fits(problem: PlanProblem, work: Workload, gpu_part: float) -> float:
    """Parameters of the largest shard of which so much may be GPU-placed; not negative."""
    each = problem.gpu_state_bytes * gpu_part + problem.sharded_bytes
    at_end = each + problem.waiting_bytes * gpu_part
    fitting = [math.inf if each <= 0.0 else work.room / each]
    fitting += [math.inf if at_end <= 0.0 else work.end_room / at_end]
    return max(0.0, min(fitting))


def test_what_is_said_to_fit_fits() -> None:
    for changes in ({}, {"stage": 3}, {"stage": 3, "offload_param": True}):
        given = problem(**changes)
        for policy in ("store", "keep"):
            found = work(policy, 6, **changes)
            for part in (0.25, 0.5, 1.0):
                shard = shard_that_fits(given, found, part)
                full = gpu_bytes(given, GPU, found, part * shard, (1.0 - part) * shard)
                assert full == pytest.approx(GPU.memory_bytes)
                number = gpu_layers_that_fit(given, found, shard * 1.001)
                assert number < round(4 * part)
                assert gpu_layers_that_fit(given, found, shard * 0.999) >= round(4 * part)
