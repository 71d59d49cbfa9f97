"""Large batches: what the search leaves out changes nothing, and work hardly grows with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from host_table_twin import held_by_samples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_clusters import plan_problems

from hytrain.formats.policies import Activations
from hytrain.tools.planner import (
    baselines,
    frontier,
    host_table,
    plan,
)
from hytrain.tools.planner import (
    candidate_loads as catalogue,
)
from hytrain.tools.planner.candidate_loads import Batches, CandidateLoads
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, Load, fits_rounds, load
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.frontier import Frontier
from hytrain.tools.planner.host_table import HostTable
from hytrain.tools.planner.pareto_set import Grid, ParetoSet
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.result import Plan

GB = 10**9


def _gpu(name: str, gigabytes: int, ms: float) -> GpuProfile:
    return GpuProfile(
        name=name,
        memory_bytes=gigabytes * GB,
        forward_ms=Table(((1.0, 1.0 + ms), (16.0, 1.0 + 16.0 * ms))),
        backward_ms=Table(((1.0, 2.0 + 2.0 * ms), (16.0, 2.0 + 32.0 * ms))),
        peak_bytes=Table(((1.0, 1e9), (16.0, 8e9))),
        stored_bytes=Table(((1.0, 2e9), (16.0, 3e10))),
        idle_bytes=GB // 2,
        update_rate=1e10,
        copy_rate=2e10,
        sizes=(1, 2, 3, 4, 6, 8, 12, 16),
        most_samples=16,
    )


def _problem(batch: int, **changes: Any) -> PlanProblem:
    speeds = (
        (24, 1.0),
        (24, 1.0),
        (48, 0.7),
        (48, 0.7),
        (24, 4.0),
        (24, 4.0),
        (24, 2.0),
        (16, 3.0),
    )
    gpus = tuple(_gpu(f"{size} GB, {ms} ms", size, ms) for size, ms in speeds)
    host = Host("host", gpus, 16, 256 * GB, 1e11, Table(((1.0, 4e8), (16.0, 4e9))))
    collective = Table(((1e6, 0.1), (1e9, 20.0)))
    whole = PlanProblem(
        Cluster((host,), collective, collective),
        Model("m", 24, 3 * GB, 4 * 2**20),
        batch,
        activations=("store", "recompute", "keep", "offload"),
    )
    return replace(whole, **changes)


# -- fast paths and their slow twins -----------------------------------------------------------


@st.composite
def _offers(draw: st.DrawFn) -> ParetoSet:
    number = draw(st.integers(1, 5))

    def column(least: int, most: int) -> Any:
        values = draw(st.lists(st.integers(least, most), min_size=number, max_size=number))
        return np.array(values, dtype=np.intp)

    return ParetoSet(column(0, 6), column(-4, 8), column(0, 9), np.arange(number), ())


@settings(max_examples=200, deadline=None)
@given(
    members=st.lists(_offers(), min_size=1, max_size=4),
    limit=st.integers(0, 20),
    host_most=st.integers(0, 20),
    others=st.integers(0, 12),
    batch=st.integers(1, 24),
    outer=st.booleans(),
    one_by_one=st.booleans(),
    is_small=st.booleans(),
)
def test_a_host_holds_as_much_by_the_rows_that_are_left_open(
    members: list[ParetoSet],
    limit: int,
    host_most: int,
    others: int,
    batch: int,
    outer: bool,
    one_by_one: bool,
    is_small: bool,
) -> None:
    grid = Grid(16, 16, outer)
    able = sum(int(offer.amounts.max()) for offer in members)
    rows = range(max(0, batch - others), min(batch, able) + 1)
    if not rows:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_table, "_ONE_BY_ONE", 0 if one_by_one else 2**30)
        patch.setattr(host_table, "_MOST_HELD", 2**13 if is_small else -1)
        table = HostTable(members, limit, grid, rows, host_most)
    steps = table.steps()
    slow = held_by_samples(members, limit, grid, batch, host_most)
    for samples in rows:
        reached = steps.amounts + table.least >= samples
        assert -steps.costs[reached].min() == slow[samples]


@settings(max_examples=60, deadline=None)
@given(random=plan_problems(most_ranks=2, most_batch=90), share=st.floats(0.0, 1.2))
def test_a_catalogue_has_the_loads_that_were_listed(random: PlanProblem, share: float) -> None:
    collectives = Collectives.of(random, even=False)
    host, gpu = random.cluster.ranks[0]
    listed = _listed(random, gpu, collectives)
    longest = max((work.compute for work in listed), default=1.0)
    step = share * longest
    rank = CandidateLoads(random, host, gpu, collectives, step)
    in_time = [work for work in listed if work.compute <= step and work.room >= 0.0]
    copied = min(step * gpu.copy_rate, step * host.bandwidth / 2.0, host.memory_bytes)
    able = [work for work in in_time if work.offloaded <= copied]
    most = max((work.batch for work in able), default=-1)
    assert rank.most_samples(step, outer=False) == most
    for least in (most, most - 1, 1, 0):
        found = [work for work in rank.menu(step, least, outer=False).loads if work in able]
        # Once made, loads stay on the menu: it has the others, too, but none twice, and in order.
        assert [work for work in found if work.batch >= least] == [
            work for work in able if work.batch >= least
        ]


def _listed(problem: PlanProblem, gpu: GpuProfile, collectives: Collectives) -> list[Load]:
    """All loads of a rank, one after another."""
    loads = [load(problem, gpu, collectives, 0, 0, problem.activations[0])]
    loads = loads if problem.allow_idle else []
    for policy in problem.activations:
        below = 0
        for size in gpu.micro_batches(problem.batch):
            batches = [*range(below + 1, size + 1)]
            if problem.batch <= 64:
                batches += range(size + 1, problem.batch + 1)
            else:
                batches += [
                    min(end, problem.batch) for end in range(2 * size, problem.batch + size, size)
                ]
            loads += [
                load(problem, gpu, collectives, batch, min(size, batch), policy)
                for batch in batches
                if batch <= problem.batch and fits_rounds(problem, batch, size)
            ]
            below = size
    return loads


@pytest.mark.parametrize("batch", [5, 64, 65, 100])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_loads_of_some_rounds_are_found_without_the_others(batch: int, size: int) -> None:
    batches = Batches(batch, min(size, batch), 0)
    for rounds in range(1, 12):
        expected = [
            index for index in batches.indices if -(-batches.at(index)[1] // batches.size) == rounds
        ]
        assert list(batches.in_rounds(rounds)) == expected


@settings(max_examples=12, deadline=None)
@given(random=plan_problems(most_ranks=3, most_batch=12))
def test_what_is_not_worked_out_would_not_have_been_shorter(random: PlanProblem) -> None:
    """One micro-batch after another, by all numbers of them, each worked out to its end."""
    policies: tuple[Activations, ...] = ("store", "recompute")
    stage_3 = replace(random, stage=3, rounds=None, activations=policies)
    assume(stage_3.needs_rounds)
    fast = make_plan(stage_3)
    slow = baselines.best_manner(stage_3, lambda one, _: make_plan(one))
    assert isinstance(fast, Plan) == isinstance(slow, Plan)
    if isinstance(fast, Plan) and isinstance(slow, Plan):
        assert fast.predicted_seconds <= slow.predicted_seconds


def test_a_number_of_rounds_that_only_other_micro_batches_make_is_worked_out() -> None:
    """Five samples on two GPUs: 2 and 3 by 2 are best, and 2 was not measured."""
    gpu = GpuProfile(
        name="x",
        memory_bytes=10 * GB,
        forward_ms=Table(((1.0, 6.0), (2.0, 7.2))),
        backward_ms=Table(((1.0, 12.0), (2.0, 24.0))),
        peak_bytes=Table(((1.0, 5e8), (2.0, 6e8))),
        stored_bytes=Table(((1.0, 1e9), (2.0, 1e9))),
        idle_bytes=0,
        update_rate=5e9,
        copy_rate=5e9,
        sizes=(1, 3),
    )
    host = Host("host", (gpu, gpu), 8, 0, 2e10, Table(((8.0, 5e8),)))
    none = Table(((1.0, 0.0),))
    cluster = Cluster((host,), none, none, 1.25)
    policies: tuple[Activations, ...] = ("store", "recompute")
    whole = PlanProblem(cluster, Model("m", 2, GB), 5, stage=3, activations=policies)
    found = make_plan(whole)
    assert isinstance(found, Plan)
    assert [(rank.batch_size, rank.microbatch_size) for rank in found.ranks] == [(2, 1), (3, 2)]
    assert found.predicted_seconds == pytest.approx(0.1984)


# -- work --------------------------------------------------------------------------------------


class _Work:
    """Counts loads that are made, and cells of tables times offers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        self.cells = 0

        def counted_load(*arguments: Any) -> Load:
            self.loads += 1
            return load(*arguments)

        def counted_table(members: Sequence[ParetoSet], *arguments: Any) -> HostTable:
            table = HostTable(members, *arguments)
            self.cells += table.num_cells
            return table

        monkeypatch.setattr(catalogue, "load", counted_load)
        monkeypatch.setattr(frontier, "HostTable", counted_table)


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"stage": 2}, (1000, 8000, 65_536)),
        ({"stage": 3}, (1000, 1024)),
        ({"stage": 3, "offload_param": True}, (1000,)),
    ],
)
def test_work_hardly_grows_with_the_batch(
    changes: dict[str, Any], batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _Work(monkeypatch)
    spent: list[tuple[int, int]] = []
    for batch in batches:
        before = work.loads, work.cells
        given_problem = _problem(batch, **changes)
        found = make_plan(given_problem)
        assert isinstance(found, Plan)
        assert sum(rank.batch_size for rank in found.ranks) == batch
        assert found.lower_bound <= found.step_seconds <= found.predicted_seconds
        spent.append((work.loads - before[0], work.cells - before[1]))
    # All loads of one rank would be 2 * 10^5 with 65,536 samples, all rows of a table 10^8 cells.
    for loads, cells in spent:
        assert loads < 60_000
        assert cells < 5e8


def test_numbers_of_rounds_that_cannot_be_shorter_are_not_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[tuple[Activations, int | None]] = []
    whole = plan._of_any_manner  # pyright: ignore[reportPrivateUsage]

    def counted(problem: PlanProblem) -> Any:
        solved.append((problem.activations[0], problem.rounds))
        return whole(problem)

    monkeypatch.setattr(plan, "_of_any_manner", counted)
    found = make_plan(_problem(512, stage=3, activations=("store", "recompute")))
    assert isinstance(found, Plan)
    assert len(solved) == len(set(solved))
    assert len(solved) < 14, solved


def test_a_step_that_others_have_beaten_is_told_by_one_look() -> None:
    given_problem = _problem(512, stage=3, activations=("recompute",), rounds=16)
    found = make_plan(given_problem)
    assert isinstance(found, Plan)
    if_shorter = plan._if_shorter  # pyright: ignore[reportPrivateUsage]
    assert if_shorter(given_problem, found.lower_bound * 0.9) is None
    again = if_shorter(given_problem, found.predicted_seconds * 1.01)
    assert isinstance(again, Plan)
    assert again.ranks == found.ranks
    frontiers = [Frontier(given_problem, even=even) for even in (True, False)]
    assert all(not one.covers(found.lower_bound * 0.5) for one in frontiers)
