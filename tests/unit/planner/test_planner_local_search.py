"""Plans made better by small changes: never worse, and within all limits."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from planner_clusters import check_plan, plan_problems

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


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_problem=plan_problems(most_ranks=3, most_batch=8))
def test_refined_plans_are_faster_and_keep_to_all_limits(random_problem: PlanProblem) -> None:
    for before, after in _changes(random_problem):
        steps = [
            max(found.step, _simulated(random_problem, found).seconds())
            for found in (before, after)
        ]
        assert steps[1] <= steps[0]
        assert after.even == before.even
        check_plan(random_problem, to_plan(random_problem, after, after.step))


def _simulated(problem: PlanProblem, found: Found) -> PlannedStep:
    return PlannedStep(problem, found.workloads, found.shares, even=found.even)
