"""Parameters that are not trained in a plan: weights, kept and gathered, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_clusters import planned
from support.plan_profiles import a_device, a_host, a_model

from hytrain.formats.profile_file import ProfileFile
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Workload,
    gpu_bytes,
    host_bytes,
    roofline,
    traffic,
    workload,
)
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.layer_seconds import Collectives, fetch_seconds
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from

GB = 10**9
GPU = GpuProfile(
    name="g",
    memory_bytes=40 * GB,
    forward_ms=Table(((1.0, 2.0),)),
    backward_ms=Table(((1.0, 4.0),)),
    peak_bytes=Table(((1.0, 1.0 * GB), (2.0, 1.1 * GB))),
    stored_bytes=Table(((1.0, 2.0 * GB), (2.0, 3.0 * GB))),
    idle_bytes=GB // 2,
    update_rate=1e11,
    copy_rate=2e10,
    fetch_rate=4e10,
)
FREE = Collectives(0.0, 0.0)


def problem(stage: Any, *, offload: bool = False, frozen: int = 6 * GB) -> PlanProblem:
    """2 G parameters in 10 layers are trained, three times as many are not."""
    host = Host("h", (GPU, GPU), 16, 512 * GB, 1e12, Table(((1.0, 1e10), (16.0, 1e11))))
    gather = Table(((1.0, 1e-9), (1e12, 1e3)))  # a millisecond a gigabyte
    return PlanProblem(
        cluster=Cluster((host,), gather, gather, (1.0, 1.0)),
        model=Model("m", 10, 2 * GB, 10**6, frozen=frozen),
        batch=8,
        stage=stage,
        activations=("keep",),
        gradient_bytes=2,
        offload_param=offload,
    )


def idle(given: PlanProblem) -> Workload:
    return workload(given, GPU, FREE, 0, 0, "keep")


def by_frozen(given: PlanProblem, on_gpu: float, on_cpu: float) -> float:
    """Bytes of GPU that frozen parameters make."""
    without = replace(given, model=replace(given.model, frozen=0))
    return gpu_bytes(given, GPU, idle(given), on_gpu, on_cpu) - gpu_bytes(
        without, GPU, idle(without), on_gpu, on_cpu
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_all_are_on_every_gpu(stage: int) -> None:
    for parts in ((0.0, 0.0), (GB, 0.0), (0.0, GB)):
        assert by_frozen(problem(stage), *parts) == pytest.approx(2 * 6 * GB)
    given = problem(stage)
    assert host_bytes(given, 0.0, GB, 0.0) == 14 * GB
    even = Collectives.of(given, even=True)
    # A layer's new weights, and its gradient: 400 MB.
    assert (even.gather, even.scatter) == pytest.approx((0.4e-3, 0.4e-3))


def test_in_stage_3_they_are_cut_with_the_others() -> None:
    given = problem(3)
    assert by_frozen(given, 0.0, 0.0) == 0.0
    # With half of what is trained goes half of what is not, wherever the state is.
    assert by_frozen(given, GB, 0.0) == pytest.approx(2 * 3 * GB)
    assert by_frozen(given, 0.0, GB) == pytest.approx(2 * 3 * GB)
    assert given.waiting_bytes == problem(3, frozen=0).waiting_bytes == 0
    even = Collectives.of(given, even=True)
    assert even.gather == pytest.approx(1.6e-3)  # all of the layer
    assert even.scatter == pytest.approx(0.4e-3)  # its gradient


def test_in_host_memory_they_are_fetched_and_never_written() -> None:
    given = problem(3, offload=True)
    assert by_frozen(given, GB, GB) == 0.0
    assert host_bytes(given, GB, 0.0, 0.0) == pytest.approx(2 * 4 * GB)
    assert host_bytes(given, 0.0, GB, 0.0) == pytest.approx((14 + 2 * 4) * GB)
    # 2 B a parameter: written once, read in two passes; of what is not trained only that.
    assert traffic(given, GB, 0.0, 0.0) == pytest.approx((2 + 2 * 2 * 4) * GB)
    host = given.cluster.hosts[0]
    assert roofline(given, host, GPU, idle(given), GB, 0.0)["copies"] == pytest.approx(
        2 * GB / 2e10
    )
    # A tenth of 8 GB a layer.
    assert fetch_seconds(given, GPU, "keep", GB)[0] == pytest.approx(0.8 * GB / 4e10)


def test_a_model_without_any_is_planned_as_before() -> None:
    assert problem(3, frozen=0).model.weight_bytes == 2.0
    assert problem(3, frozen=0).sharded_bytes == 4.0


# -- from a profile ----------------------------------------------------------------------------


def profiled(
    frozen_layer: int, frozen_outside: tuple[int, int] = (0, 0), **changes: Any
) -> PlanProblem:
    """Two GPUs and adapters: of a layer's parameters a hundredth is trained."""
    small = {"layer_parameters": 1_000_000, "outside_parameters": (0, 0)}
    frozen = {
        "frozen_layer_parameters": frozen_layer,
        "frozen_outside_parameters": frozen_outside,
    }
    model = a_model().model_copy(update=small | frozen)
    fast, slow = a_device("one", "fast"), a_device("one", "slow", speed=0.5, gigabytes=24)
    profile = ProfileFile(model=model, devices=(fast, slow), hosts=(a_host("one", fast, slow),))
    options = PlanOptions(
        batch=8,
        gpu_reserve=lambda _: 0,
        host_reserve=lambda _: 0,
        interconnect=5e10,
        **{"stage": 2, **changes},
    )
    return problem_from(profile, options)


def test_gathered_layers_are_whole() -> None:
    bare = profiled(0, stage=3).cluster.ranks[0][1].idle_bytes
    layers = profiled(99_000_000, stage=3)
    assert layers.model.frozen == 12 * 99_000_000
    assert layers.cluster.ranks[0][1].idle_bytes - bare == 2 * 3 * 99_000_000
    # Embeddings are gathered in one piece, beside fewer layers.
    outside = profiled(99_000_000, (900_000_000, 7), stage=3)
    assert outside.cluster.ranks[0][1].idle_bytes - bare == 2 * (900_000_000 - 3 * 1_000_000)
    asked: list[list[int]] = []
    profiled(99, (5, 0), stage=3, live_parameters=lambda sizes: asked.append([*sizes]) or 1)
    assert asked == [[5, *[1_000_099] * 12]]


def test_a_frozen_model_fills_gpus_below_stage_3_and_is_cut_in_stage_3() -> None:
    # 2 B x 12 layers x 2 G: 48 GB, more than the small GPU has.
    whole = make_plan(profiled(2_000_000_000))
    assert isinstance(whole, Infeasible)
    cut = planned(profiled(2_000_000_000, stage=3, memory_fraction=0.95))
    assert cut.ranks[0].shard_fraction > cut.ranks[1].shard_fraction
    for rank, limit in zip(cut.ranks, (80, 24), strict=True):
        assert 2 * 24 * GB * rank.shard_fraction < rank.gpu_bytes <= limit * 2**30
    planned(profiled(0))
