"""Weights in host memory: what fetching them takes, by hand and against a slow twin; the plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_clusters import planned, with_hosts

from hytrain.errors import PlanError
from hytrain.formats.policies import Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.allocation import Share
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
from hytrain.tools.planner.layer_seconds import (
    Collectives,
)
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.plan_report import plan_text
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import Model, PlanProblem

GB = 10**9
LAYERS = 10
FREE = Collectives(0.0, 0.0)
CHUNK = 2 * 2**24 / 2e10
# A sample's forward takes 2 ms of each layer, its backward 4 and recomputation 2.
GPU = GpuProfile(
    name="g",
    memory_bytes=10 * GB,
    forward_ms=Table(((1.0, 2.0),)),
    backward_ms=Table(((1.0, 4.0),)),
    peak_bytes=Table(((1.0, 1.0 * GB), (2.0, 1.1 * GB))),
    stored_bytes=Table(((1.0, 2.0 * GB), (2.0, 3.0 * GB))),
    idle_bytes=GB // 2,
    update_rate=1e11,
    copy_rate=2e10,
    fetch_rate=4e10,
)


def problem(
    *gpus: GpuProfile, gigabytes: int = 512, ms: float = 0.0, **changes: Any
) -> PlanProblem:
    """Layers of 400 MB each: 10 ms from the host in forward, 20 in backward, on one rank."""
    host = Host(
        "host", gpus or (GPU,), 16, gigabytes * GB, 1e12, Table(((1.0, 1e10), (16.0, 1e11)))
    )
    collective = Table(((1.0, ms), (1e12, ms)))
    whole = PlanProblem(
        cluster=Cluster((host,), collective, collective, (1.0, 1.0)),
        model=Model("m", LAYERS, 2 * GB, 10**6),
        batch=8,
        stage=3,
        activations=("recompute", "keep"),
        gradient_bytes=2,
        clipped_share=0.0,
        offload_param=True,
    )
    return replace(whole, **changes)


def seconds(given_problem: PlanProblem, work: Workload, shard: float) -> float:
    """The GPU's bound, with all state on the host."""
    one = given_problem.cluster.hosts[0]
    return roofline(given_problem, one, one.gpus[0], work, 0.0, shard)["gpu"]


# -- what it takes -----------------------------------------------------------------------------


def test_the_longer_of_fetch_and_compute_counts_in_every_pass() -> None:
    whole = problem()
    # Layer by layer: 16 ms forward, 16 + 32 backward. 10 and 20 ms of fetches hide, but the first.
    work = workload(whole, GPU, FREE, 8, 2, "keep")
    assert work.compute == pytest.approx(LAYERS * 0.064)
    assert seconds(whole, work, 2 * GB) == pytest.approx(LAYERS * 0.064 + 0.010)
    # Two samples: 4 ms forward, 12 backward, of which nothing is left but the fetches.
    few = workload(whole, GPU, FREE, 2, 2, "keep")
    assert seconds(whole, few, 2 * GB) == pytest.approx(LAYERS * (0.010 + 0.020) + 0.010)
    # One by one every micro-batch fetches; each forward begins with a fetch.
    one_by_one = workload(replace(whole, rounds=4), GPU, FREE, 8, 2, "recompute")
    assert seconds(whole, one_by_one, 2 * GB) == pytest.approx(4 * (LAYERS * 0.030 + 0.010))
    # Half the shard is half the fetch: 5 ms beside 4, 10 beside 12.
    assert seconds(whole, few, GB) == pytest.approx(LAYERS * (0.005 + 0.012) + 0.005)


def test_a_gather_begins_when_the_fetch_has_ended() -> None:
    # 3 ms of all-gather and as much of reduce-scatter.
    two = problem(GPU, GPU, ms=3.0)
    both = Collectives.of(two, even=True)
    work = workload(two, GPU, both, 2, 2, "keep")
    # Half a layer a rank: forward 5 + 3 beside 4 of compute, backward 10 + 3 + 3 beside 12.
    assert seconds(two, work, GB) == pytest.approx(LAYERS * (0.008 + 0.016) + 0.005)


def test_activations_share_the_way_with_weights() -> None:
    given_problem = problem(model=Model("m", LAYERS, 2 * GB, 10**8))
    work = workload(given_problem, GPU, FREE, 2, 2, "offload")
    # Forward: 200 MB leave, while 400 come, both ways at once: 20 ms. Backward: 600 MB come.
    assert seconds(given_problem, work, 2 * GB) == pytest.approx(LAYERS * 0.050 + 0.020)


def test_traffic_and_memory_of_a_host() -> None:
    given_problem = problem(rounds=3)
    work = workload(given_problem, GPU, FREE, 6, 2, "recompute")
    # GPU-placed: the new copy arrives, and leaves in six passes. CPU-placed: the update moves 30 B
    # a parameter, of which 4 were for a new copy that is staged and sent.
    assert traffic(given_problem, 1.0, 0.0, work.offloaded) == 2 + 6 * 2
    assert traffic(given_problem, 0.0, 1.0, work.offloaded) == 26 + 2 + 6 * 2
    assert host_bytes(given_problem, GB, 0.0, work.offloaded) == 2 * GB
    assert host_bytes(given_problem, GB, GB, work.offloaded) == (2 + 2 + 14) * GB
    # The GPU has gradients of its shard, state and what is gathered, which its peak has.
    idle = workload(given_problem, GPU, FREE, 0, 0, "recompute")
    assert gpu_bytes(given_problem, GPU, idle, GB, 0.0) == GB // 2 + (2 + 12) * GB
    resident = replace(given_problem, offload_param=False)
    idle = workload(resident, GPU, FREE, 0, 0, "recompute")
    assert gpu_bytes(resident, GPU, idle, GB, 0.0) == GB // 2 + (4 + 12) * GB
    assert host_bytes(resident, GB, 0.0, 0.0) == 0.0


def test_gradients_that_one_rank_sends_as_they_come_are_not_kept() -> None:
    assert problem(rounds=3).sharded_bytes == 2  # they add up
    assert problem(activations=("keep",)).sharded_bytes == 0
    assert problem(rounds=1).sharded_bytes == 0
    # Several ranks learn in their first backward in which order they come.
    assert problem(GPU, GPU, activations=("keep",)).sharded_bytes == 2
    assert problem(rounds=1, offload_param=False).sharded_bytes == 4


# -- steps of several ranks --------------------------------------------------------------------


def test_all_ranks_wait_for_the_longest_fetch() -> None:
    two = problem(GPU, GPU)
    works = [workload(two, GPU, FREE, 2, 2, "keep")] * 2

    def step(*fractions: float) -> float:
        shares = [Share(fraction, 0) for fraction in fractions]
        return PlannedStep(two, works, shares, even=False).seconds()

    # As by hand above: half the layer, and all of it, which the other rank waits for. The last
    # gradient leaves for the host, and the next forward waits for its update.
    half, whole = LAYERS * 0.017 + 0.005 + 0.010, LAYERS * 0.030 + 0.010 + 0.020
    assert step(0.5, 0.5) == pytest.approx(half + CHUNK)
    assert step(1.0, 0.0) == pytest.approx(whole + CHUNK)
    # A rank without samples fetches for the others.
    works = [workload(two, GPU, FREE, 2, 2, "keep"), workload(two, GPU, FREE, 0, 0, "keep")]
    assert step(0.0, 1.0) == pytest.approx(whole + CHUNK)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_the_simulated_step_of_one_rank_has_the_same_fetches(policy: Activations) -> None:
    given_problem = problem(rounds=4 if policy == "recompute" else None)
    for batch in (4, 8):
        work = workload(given_problem, GPU, FREE, batch, batch // 4, policy)
        step = PlannedStep(given_problem, [work], [Share(1.0, 0)], even=True).seconds()
        # The last gradient's way to the host, all of it and its first chunk.
        assert step == pytest.approx(seconds(given_problem, work, 2 * GB) + 0.020 + CHUNK)


def test_gpu_updates_are_on_the_host_before_they_are_fetched() -> None:
    # One sample: 30 ms of a layer are fetches. Copies of 400 MB to the host take 20 ms each.
    given_problem = problem()
    work = workload(given_problem, GPU, FREE, 1, 1, "keep")

    def step(gpu_layers: int, whole: PlanProblem) -> float:
        return PlannedStep(whole, [work], [Share(1.0, gpu_layers)], even=True).seconds()

    resident = replace(given_problem, offload_param=False)
    update = 0.2e9 / 1e11
    assert step(LAYERS, resident) == pytest.approx(LAYERS * (0.008 + update))
    # Ten of them one after another, the last layer's forward and all of backward behind that.
    slow = LAYERS * (update + 0.020) + 0.010 + LAYERS * 0.020 + 0.010
    assert step(LAYERS, given_problem) == pytest.approx(slow)


# -- plans -------------------------------------------------------------------------------------


def test_a_model_whose_weights_exceed_the_gpu_is_planned() -> None:
    # 20 GB of weights, 20 of gradients and 120 of state on 4 GB, of which 1 GB is for work.
    model = Model("large", LAYERS, 10 * GB, 10**6)
    one = replace(GPU, memory_bytes=4 * GB, sizes=tuple(range(1, 3)))
    given_problem = problem(one, model=model)
    resident = make_plan(replace(given_problem, offload_param=False))
    assert isinstance(resident, Infeasible)
    plan = planned(given_problem)
    (rank,) = plan.ranks
    assert rank.gpu_bytes <= 4 * GB
    assert rank.host_bytes == pytest.approx((2 + 14 * (1 - rank.gpu_layers / LAYERS)) * 10 * GB)
    assert plan.lower_bound <= plan.step_seconds <= plan.predicted_seconds
    # 20 GB come twice: 0.5 s forward and 1 s backward beside 0.64 of compute, layer by layer.
    assert plan.accumulation == "layer_major"
    assert rank.limit == "weights"
    assert plan.step_seconds == pytest.approx(0.5 + 1.0 + 0.05, rel=0.05)
    assert "weights from the host" in plan_text(given_problem, plan)
    # With more samples the fetches hide.
    more = planned(replace(given_problem, batch=64, activations=("keep",)))
    assert more.ranks[0].limit == "gpu"
    assert more.step_seconds == pytest.approx(64 * 0.08 + 0.05, rel=0.02)
    # A host without room for weights and state is none.
    poor = make_plan(problem(one, model=model, gigabytes=100))
    assert isinstance(poor, Infeasible)
    assert poor.missing > 0.0


def test_fetches_count_in_every_round() -> None:
    # Eight rounds are 8 x 2 x 8 GB of a host that moves 20 GB/s, and 8 GB are written.
    model = Model("large", LAYERS, 4 * GB, 10**6)
    one = replace(GPU, memory_bytes=80 * GB, sizes=tuple(range(1, 2)))
    given_problem = problem(one, one, model=model, batch=16, activations=("recompute",))
    host = replace(given_problem.cluster.hosts[0], bandwidth=2e10)
    given_problem = with_hosts(given_problem, host)
    assert planned(given_problem).step_seconds == pytest.approx(17 * 8 * GB / 2e10, rel=1e-3)


def test_shards_follow_room_and_speed_of_the_hosts() -> None:
    # Two hosts; the second one's copies are four times as slow, so it owns less of the weights.
    fast = replace(GPU, memory_bytes=40 * GB)
    slow = replace(fast, copy_rate=5e9, fetch_rate=1e10)
    model = Model("large", LAYERS, 10 * GB, 10**6)
    given_problem = problem(fast, model=model, batch=16, activations=("keep",))
    quick, other = given_problem.cluster.hosts[0], problem(slow).cluster.hosts[0]
    plan = planned(with_hosts(given_problem, quick, replace(other, name="second")))
    assert plan.ranks[0].shard_fraction > 1.5 * plan.ranks[1].shard_fraction
    assert plan.predicted_seconds >= plan.lower_bound


def test_a_host_without_room_for_the_weights_is_none() -> None:
    # The GPUs have room for all state, but of 4 GB of weights their host holds 3.
    roomy = replace(GPU, memory_bytes=400 * GB)
    for ranks in ((roomy,), (roomy, roomy)):
        refused = make_plan(problem(*ranks, gigabytes=3))
        assert isinstance(refused, Infeasible)
        assert not refused.is_close
        assert "the host (host) can use 2.79 GiB and must hold 3.73 at least" in refused.reason


def test_below_stage_3_it_is_refused() -> None:
    with pytest.raises(PlanError, match="only stage 3"):
        problem(stage=2)
