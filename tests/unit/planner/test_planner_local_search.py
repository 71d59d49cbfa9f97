"""Plans made better by small changes: never worse, and within all limits."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from planner_clusters import plan_problems

from hytrain.tools.planner import plan as plan_module
from hytrain.tools.planner.local_search import local_search
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Found, to_plan


def _changes(problem: PlanProblem) -> list[tuple[Found, Found]]:
    """What the local search was given and gave back while a plan was made."""
    seen: list[tuple[Found, Found]] = []

    def watch(given: PlanProblem, found: Found) -> Found:
        better = local_search(given, found)
        seen.append((found, better))
        return better

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "local_search", watch)
        make_plan(problem)
    return seen


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_problem=plan_problems(most_ranks=3, most_batch=8))
def test_refined_plans_are_faster_and_keep_to_all_limits(random_problem: PlanProblem) -> None:
    for before, after in _changes(random_problem):
        plans = [to_plan(random_problem, found, found.step) for found in (before, after)]
        walked = [
            max(found.step, _walked(random_problem, found).seconds()) for found in (before, after)
        ]
        assert walked[1] <= walked[0]
        assert after.even == before.even
        assert sum(rank.batch_size for rank in plans[1].ranks) == random_problem.batch
        assert sum(rank.shard_fraction for rank in plans[1].ranks) == pytest.approx(1.0)
        by_host: dict[str, float] = {}
        for rank, (host, gpu) in zip(plans[1].ranks, random_problem.cluster.ranks, strict=True):
            assert rank.batch_size >= (0 if random_problem.allow_idle else 1)
            assert rank.shard_fraction >= 0.0
            assert rank.gpu_bytes <= gpu.memory_bytes * (1.0 + 1e-9)
            by_host[host.name] = by_host.get(host.name, 0.0) + rank.host_bytes
        for host in random_problem.cluster.hosts:
            assert by_host[host.name] <= host.memory_bytes * (1.0 + 1e-9) + 1.0


def _walked(problem: PlanProblem, found: Found) -> PlannedStep:
    return PlannedStep(problem, found.workloads, found.shares, even=found.even)
