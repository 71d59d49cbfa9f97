"""Planning over pools of GPUs, held against every plan of small problems."""

from __future__ import annotations

import dataclasses
import math

import pytest

from hytrain.errors import PlanError
from hytrain.tools.hybrid.pools.cost import fits, links_between, reduce_seconds, step_seconds
from hytrain.tools.hybrid.pools.counts import find_counts
from hytrain.tools.hybrid.pools.kinds import weights_of
from hytrain.tools.hybrid.pools.problem import Plan, Replicas, Stage
from hytrain.tools.hybrid.pools.search import plan_pools
from tests.support.pool_problems import every_plan, random_problem


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("layers", "gpus"), [(3, (3, 2)), (4, (4,)), (2, (3, 3, 2))])
def test_no_plan_is_cheaper(seed: int, layers: int, gpus: tuple[int, ...]) -> None:
    problem = random_problem(seed, layers=layers, gpus=gpus)
    costs = [step_seconds(problem, plan) for plan in every_plan(problem)]
    if not costs:
        with pytest.raises(PlanError, match="no plan fits"):
            plan_pools(problem)
        return
    found = plan_pools(problem)
    assert fits(problem, found.plan)
    assert found.cost == step_seconds(problem, found.plan)
    assert found.bound <= min(costs) * (1 + 1e-9)
    if found.optimal:
        assert found.cost <= min(costs) * (1 + 1e-6)
    # Other counts of the best kinds may be better by what their links differ; the bound says so.
    assert found.cost <= 1.05 * min(costs)


def test_a_search_that_is_stopped_has_a_plan_and_a_bound() -> None:
    problem = random_problem(1, layers=6, gpus=(8, 8))
    whole, stopped = plan_pools(problem), plan_pools(problem, max_seconds=0.0)
    assert stopped.bound <= whole.cost <= stopped.cost
    assert fits(problem, stopped.plan)


def test_the_result_does_not_depend_on_the_order_of_the_profiles() -> None:
    problem = random_problem(3)
    turned = dataclasses.replace(problem, profiles=dict(reversed(list(problem.profiles.items()))))
    assert plan_pools(problem).plan == plan_pools(turned).plan


def test_cost_by_hand() -> None:
    """One stage of two replicas: M - 1 further micro-batches, the update, one all-reduce."""
    problem = random_problem(5, layers=2, gpus=(2,))
    plan = Plan((Stage(0, 2, (Replicas(0, 1, 2),)),), 1)
    times = problem.profiles["A", 1, 1]
    size = sum(problem.parameter_bytes)
    pieces = [problem.bucket_bytes] * math.floor(size / problem.bucket_bytes)
    pieces.append(size - sum(pieces))
    (_, slope, base), gigabytes = problem.curves["A", "here", 1, "A", "here", 1], 1e9
    reduce = sum(
        2 * (piece / 2) / gigabytes / (base + slope * math.log2(piece / 2 / 1e6))
        for piece in pieces
    )
    expected = problem.batch / 2 * sum(times.compute) + times.update[0] + reduce
    assert step_seconds(problem, plan) == pytest.approx(expected, rel=1e-12)


def test_who_sends_to_whom() -> None:
    one = Stage(0, 1, (Replicas(0, 1, 3), Replicas(1, 2, 1)))
    other = Stage(1, 2, (Replicas(0, 2, 2), Replicas(1, 1, 2)))
    assert links_between(one, other) == {
        ((0, 1), (0, 2)),
        ((0, 1), (1, 1)),
        ((1, 2), (1, 1)),
    }


def test_a_link_whose_curve_falls_to_nothing_is_not_fast() -> None:
    problem = random_problem(2)
    assert math.isinf(float(reduce_seconds(problem, 1e3, 2, (0.0, 1.0, 1.0))))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (
            (Stage(0, 2, (Replicas(0, 1, 2),)), Stage(2, 4, (Replicas(0, 1, 1),))),
            "as many replicas",
        ),
        ((Stage(0, 3, (Replicas(0, 1, 1),)),), "layers 0 to 4"),
        ((Stage(0, 4, (Replicas(0, 4, 1),)),), "no profile of A at tp 4"),
    ],
)
def test_what_is_no_plan(stages: tuple[Stage, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        step_seconds(random_problem(0), Plan(stages, 1))


def test_what_is_no_problem() -> None:
    problem = random_problem(0)
    with pytest.raises(PlanError, match="no pool"):
        dataclasses.replace(problem, pools=())
    with pytest.raises(PlanError, match="no profile of it"):
        dataclasses.replace(
            problem, pools=(dataclasses.replace(problem.pools[0], device="Z"), *problem.pools[1:])
        )
    with pytest.raises(PlanError, match="4 layers"):
        dataclasses.replace(problem, parameter_bytes=(1.0,))


def test_counts_are_found_where_only_one_way_fits() -> None:
    problem = random_problem(0, gpus=(4, 4))
    mixed = ((0, 1), (1, 2))
    counts, proven = find_counts([mixed, mixed], 3, (4, 4), weights_of(problem))
    assert (counts, proven) == ([(2, 1), (2, 1)], True)
    counts, proven = find_counts([mixed, mixed], 4, (4, 4), weights_of(problem))
    assert (counts, proven) == (None, True)
