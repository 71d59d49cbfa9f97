"""The even split and samples by speed: what their rules say, never better than the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from planner_clusters import GB, gpu, host, plan_problems, planned, problem

from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.baselines import baselines, even_split, samples_by_speed
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Plan


def on_one_host(*gpus: GpuProfile, gigabytes: int = 256, batch: int = 40) -> PlanProblem:
    return problem(host(*gpus, gigabytes=gigabytes), batch=batch)


def test_the_even_split_runs_at_the_slowest() -> None:
    given_problem = on_one_host(gpu("fast", 80, 1.0), gpu("slow", 80, 4.0))
    even = planned(given_problem, even_split)
    assert [rank.batch_size for rank in even.ranks] == [20, 20]
    assert [rank.shard_fraction for rank in even.ranks] == [0.5, 0.5]
    assert len({rank.microbatch_size for rank in even.ranks}) == 1
    plan = planned(given_problem)
    assert even.step_seconds > 2.0 * plan.step_seconds


@pytest.mark.parametrize("batch", [6, 12, 16, 26, 48])
def test_an_even_split_of_equal_gpus_is_as_good_as_the_plan(batch: int) -> None:
    """Also where no micro-batch that was measured divides it: all at once is one, too."""
    times = Table(((1.0, 5.0), (8.0, 12.0)))
    one = replace(gpu("a", 80, 1.0), forward_ms=times, backward_ms=times, sizes=(1, 2, 4, 8))
    given_problem = on_one_host(one, one, batch=batch)
    even, plan = planned(given_problem, even_split), planned(given_problem)
    assert even.step_seconds == pytest.approx(plan.step_seconds, rel=1e-3)


def test_micro_batches_of_an_even_split_are_those_that_all_may_use() -> None:
    few = replace(gpu("few", 80, 1.0), sizes=(1, 2, 5))
    many = replace(gpu("many", 80, 1.0), sizes=(1, 4, 8))
    even = planned(on_one_host(few, many, batch=12), even_split)
    assert [rank.microbatch_size for rank in even.ranks] == [1, 1]


def test_a_batch_that_does_not_divide_gives_the_first_ranks_one_more() -> None:
    even = planned(on_one_host(*[gpu("a", 80, 1.0)] * 3), even_split)
    assert [rank.batch_size for rank in even.ranks] == [14, 13, 13]
    few = even_split(on_one_host(*[gpu("a", 80, 1.0)] * 3, batch=2))
    assert isinstance(few, Infeasible)
    assert "cannot be split" in few.reason


def test_samples_follow_the_speed_and_state_does_not() -> None:
    by_speed = planned(on_one_host(gpu("fast", 80, 1.0), gpu("slow", 80, 3.0)), samples_by_speed)
    assert [rank.batch_size for rank in by_speed.ranks] == [30, 10]
    assert [rank.shard_fraction for rank in by_speed.ranks] == [0.5, 0.5]


def test_a_small_fast_gpu_makes_even_shards_run_out_of_memory() -> None:
    # As planned in test_planner_plan: no host memory, 42 GB of state, 8 GB on the fast GPU.
    given_problem = on_one_host(gpu("fast", 8, 1.0), gpu("slow", 80, 4.0), gigabytes=0)
    assert isinstance(make_plan(given_problem), Plan)
    # The even split offloads activations on both ranks, of 20 samples each, the one by speed on the
    # fast one, of 30. The first layer's inputs stay there.
    cases = (40, 20), (30, 30)
    for baseline, (samples, first) in zip(baselines(given_problem), cases, strict=True):
        assert isinstance(baseline.result, Infeasible), baseline.name
        assert "host host and its GPUs lack" in baseline.result.reason
        # Half the state is 21 GB; of 8 GB, 6 are the training copy and 1 a layer's activations. The
        # other layers' have no room but on the host.
        missing = (21 - 1) * GB + (samples * 24 + first) * 4 * 2**20
        assert baseline.result.missing == pytest.approx(missing / 2**30, rel=1e-6)


def test_a_gpu_without_room_for_its_samples_is_named() -> None:
    for baseline in baselines(on_one_host(gpu("big", 80, 1.0), gpu("tiny", 6, 1.0))):
        if baseline.name == "even split":
            assert isinstance(baseline.result, Infeasible)
            assert "rank 1 (tiny) lacks" in baseline.result.reason
            assert baseline.result.gpu == 1


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random=plan_problems(most_ranks=3, most_batch=4))
def test_no_baseline_is_better_than_the_bound(random: PlanProblem) -> None:
    plan = make_plan(replace(random, allow_idle=True))
    for baseline in baselines(random):
        found = baseline.result
        if isinstance(found, Infeasible):
            continue
        assert sum(rank.batch_size for rank in found.ranks) == random.batch
        assert {rank.shard_fraction for rank in found.ranks} == {1.0 / random.cluster.num_ranks}
        for rank, (_, device) in zip(found.ranks, random.cluster.ranks, strict=True):
            assert rank.gpu_bytes <= device.memory_bytes * (1.0 + 1e-9)
        if isinstance(plan, Plan):
            assert found.step_seconds >= plan.lower_bound * (1.0 - 1e-6)
