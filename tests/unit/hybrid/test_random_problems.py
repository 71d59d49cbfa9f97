"""The exact search against brute force, on random problems with all options."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support.hybrid_plans import brute_force, random_problem

from hytrain.errors import PlanError
from hytrain.tools.hybrid.cost_model import choices, plan_cost, stage
from hytrain.tools.hybrid.problem import DeviceType, Host, Node, Options, Problem
from hytrain.tools.hybrid.search import NoPlanError, QuickBounds, plan
from hytrain.tools.hybrid.space import orders, size_classes
from hytrain.tools.hybrid.stage_tables import Tables, stage_tables


def _check(problem: Problem) -> None:
    least, best, _ = brute_force(problem)
    if best is None:
        with pytest.raises(NoPlanError, match="no plan fits"):
            plan(problem)
        return
    # Brute force adds up for itself; here the cost model does.
    assert plan_cost(problem, best).total == pytest.approx(least, rel=1e-12)
    result = plan(problem)
    assert result.is_optimal
    assert result.cost == pytest.approx(least, rel=1e-11)
    found = plan_cost(problem, result.plan)
    assert found.fits
    assert found.total == pytest.approx(result.cost, rel=1e-12)


@pytest.mark.parametrize("seeds", [range(n, n + 10) for n in range(0, 40, 10)], ids=str)
def test_brute_force_finds_nothing_better(seeds: range) -> None:
    for seed in seeds:
        _check(random_problem(seed))


def test_hosts_that_more_gpus_share_are_another_kind_of_stage() -> None:
    problem = random_problem(0)
    _check(
        replace(
            problem,
            nodes=(Node("m0", "a", 2), Node("m1", "a", 1), Node("m2", "a", 1)),
            devices=(DeviceType("a", 40.0, 1e-3, 1.0),),
            variance=0.25,
            max_tp=1,
            hidden_size=10,
            vocab_size=10,
            options=Options(host=Host(64.0, 1e6, 30.0)),
        )
    )


@pytest.mark.experiment
@pytest.mark.parametrize("seeds", [range(n, n + 50) for n in range(0, 500, 50)], ids=str)
def test_brute_force_finds_nothing_better_in_500(seeds: range) -> None:
    for seed in seeds:
        _check(random_problem(seed))


@pytest.mark.parametrize("seed", range(12))
def test_tables_are_the_cost_model(seed: int) -> None:
    problem = random_problem(seed)
    classes = size_classes(problem)
    if not classes:
        pytest.skip("no groups of powers of two add up")
    size, order = classes[-1], next(orders(problem))
    tables = Tables(problem)
    where = tables.layout(order, size)
    found = tables.choices(where, 2)
    made = stage_tables(problem, found, problem.num_layers)
    for kind, group in enumerate(found):
        for number, choice in enumerate(group):
            for start, stop in itertools.combinations(range(problem.num_layers + 1), 2):
                at = (kind, number, start, stop - start - 1)
                one = stage(problem, choice, start, stop)
                if not one.fits:
                    assert made.time[at] == float("inf")
                    continue
                assert made.time[at] == pytest.approx(one.time, rel=1e-12)
                assert made.update[at] == pytest.approx(one.update, rel=1e-9, abs=1e-9)
                assert made.gradients[at] == pytest.approx(one.gradients, rel=1e-9)
                assert made.activation[at] == pytest.approx(one.activation, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_a_search_that_stops_has_a_true_bound(seed: int) -> None:
    problem = random_problem(seed)
    try:
        optimum = plan(problem).cost
    except NoPlanError:
        pytest.skip("no plan fits")
    early = plan(problem, seconds=0.0)
    assert early.bound <= optimum * (1 + 1e-12)
    assert early.cost >= optimum * (1 - 1e-12)
    near = plan(problem, gap=0.1)
    assert near.cost <= optimum / 0.9 + 1e-9
    assert near.gap <= 0.1 + 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_quick_bounds_are_below_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    try:
        found = plan(problem, top=8).best
    except NoPlanError:
        pytest.skip("no plan fits")
    quick = QuickBounds(problem)
    for one in found:
        stages = one.plan.stages
        (size,) = (c for c in size_classes(problem) if c.fewest <= stages <= c.most)
        assert quick.bound(size, one.plan.micro_batches) <= one.cost * (1 + 1e-12)


def test_the_best_parts_come_in_order() -> None:
    problem = random_problem(1)
    result = plan(problem, top=4)
    costs = [one.cost for one in result.best]
    assert costs == sorted(costs)
    assert result.cost == pytest.approx(plan(problem).cost, rel=1e-12)
    parts = {(one.plan.order, one.plan.micro_batches, one.plan.groups) for one in result.best}
    assert len(parts) == 4
    for one in result.best:
        assert plan_cost(problem, one.plan).total == pytest.approx(one.cost, rel=1e-12)


def test_what_was_not_profiled_is_no_choice() -> None:
    problem = random_problem(2)
    ranks = problem.ranks(next(orders(problem)))
    with pytest.raises(PlanError, match="samples were profiled"):
        choices(problem, ranks, 0, (1, 2 * problem.max_tp), problem.gbs)
    with pytest.raises(PlanError, match="micro-batches for"):
        choices(problem, ranks, 0, (2, 1), problem.gbs)
