"""Large batches on random clusters: plans within 1 % of the best, by the oracle's word."""

from __future__ import annotations

import pytest
from plan_oracle import may_be_as_fast
from planner_clusters import planned
from planner_large_clusters import hosts_of_offloading_ranks, large_problem

from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.result import Plan

# The others take 20 minutes (make test-uneven-plans). Hosts that are nearly full, as those of 190,
# are in the test below. In 31 equal ranks have unequal work, in 198 few numbers of samples make as
# many micro-batches.
SOME = (0, 2, 31, 198)


@pytest.mark.parametrize(
    "seed",
    [s if s in SOME else pytest.param(s, marks=pytest.mark.experiment) for s in range(200)],
)
def test_no_plan_is_1_percent_faster(seed: int) -> None:
    """The planner's own bound and the oracle deny it; what is said not to fit does not."""
    problem = large_problem(seed)
    plan = make_plan(problem)
    if not isinstance(plan, Plan):
        assert plan.is_close or not may_be_as_fast(problem, 1e6)
        return
    assert plan.lower_bound <= plan.shortest_step <= plan.step_seconds <= plan.predicted_seconds
    assert plan.shortest_step <= 1.01 * plan.lower_bound
    assert not may_be_as_fast(problem, plan.shortest_step / 1.01)


@pytest.mark.experiment
def test_there_is_a_plan_with_less_memory_still() -> None:
    step, tighter = (
        planned(hosts_of_offloading_ranks(gigabytes=g)).step_seconds for g in (210, 200)
    )
    assert step < tighter < 1.05 * step
