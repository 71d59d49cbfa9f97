"""Large batches: what the search leaves out changes nothing, and work hardly grows with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_clusters import plan_problems

from hytrain.errors import PlanError
from hytrain.formats.policies import Activations
from hytrain.tools.planner import mixed_integer, plan, rank_loads
from hytrain.tools.planner.accumulation_modes import best_mode, some_rounds
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    Load,
    fits_rounds,
    load,
    sizes_to_choose,
)
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.mixed_integer import MixedIntegerProgram
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.rank_loads import RankLoads
from hytrain.tools.planner.result import Plan
from hytrain.tools.planner.step_program import StepProgram

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


@settings(max_examples=12, deadline=None)
@given(random=plan_problems(most_ranks=3, most_batch=12))
def test_what_is_not_worked_out_would_not_have_been_shorter(random: PlanProblem) -> None:
    """One micro-batch after another, by all numbers of them, each worked out to its end."""
    policies: tuple[Activations, ...] = ("store", "recompute")
    stage_3 = replace(random, stage=3, rounds=None, activations=policies)
    assume(stage_3.needs_rounds)
    fast = make_plan(stage_3)
    slow = best_mode(stage_3, make_plan, lambda one: some_rounds(one, make_plan))
    assert isinstance(fast, Plan) == isinstance(slow, Plan)
    if isinstance(fast, Plan) and isinstance(slow, Plan):
        # Less of a gain is not searched for.
        assert fast.predicted_seconds <= slow.predicted_seconds * 1.004


def test_rounds_may_have_micro_batches_that_were_not_measured() -> None:
    """Five samples on two GPUs: 2 and 3 at once are best, and 2 was not measured."""
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
    assert [(rank.batch_size, rank.microbatch_size) for rank in found.ranks] == [(3, 3), (2, 2)]
    assert found.predicted_seconds == pytest.approx(0.1888)


# -- loads -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    random=plan_problems(most_ranks=2, most_batch=120),
    share=st.floats(0.0, 1.2),
    listed=st.sampled_from((0, 96)),
)
def test_chains_are_at_least_as_good_as_every_load(
    random: PlanProblem, share: float, listed: int
) -> None:
    """Between the corners of some chain there is a point that is no worse in all numbers."""
    collectives = Collectives.of(random, even=False)
    host, gpu = random.cluster.ranks[0]
    policies = random.activations
    every = [
        load(random, gpu, collectives, samples, min(size, samples), policy)
        for policy in policies
        for samples in range(1, random.batch + 1)
        for size in sizes_to_choose(random, gpu, samples)
        if fits_rounds(random, samples, size)
    ]
    step = share * max((work.compute for work in every), default=1.0)
    copied = min(step * gpu.copy_rate, step * host.bandwidth / 2.0, host.memory_bytes)
    able = [
        work
        for work in every
        if work.compute <= step and work.room >= 0.0 and work.offloaded <= copied
    ]
    rank = RankLoads(random, host, gpu, collectives, step, _rounds(random))
    idle = load(random, gpu, collectives, 0, 0, policies[0])
    is_idle = random.allow_idle and idle.room >= 0.0 and idle.compute <= step
    most = max((work.batch for work in able), default=0 if is_idle else -1)
    assert rank.most_samples(step) == most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_loads, "_MOST_LISTED", listed)
        chains = rank.chains(step, 0)
    for work in able:
        assert any(_reaches(chain.loads, work) for chain in chains), work


def _rounds(problem: PlanProblem) -> range | None:
    return None if problem.rounds is None else range(problem.rounds, problem.rounds + 1)


def _reaches(corners: tuple[Load, ...], work: Load) -> bool:
    samples = [one.batch for one in corners]
    if corners[0].activations != work.activations or not samples[0] <= work.batch <= samples[-1]:
        return False

    def mean(name: str) -> float:
        return float(np.interp(work.batch, samples, [getattr(one, name) for one in corners]))

    is_fast = all(mean(name) <= getattr(work, name) * (1.0 + 1e-9) for name in ("compute", "edge"))
    return is_fast and all(
        mean(name) >= getattr(work, name) - 1e-3 for name in ("room", "end_room")
    )


# -- work --------------------------------------------------------------------------------------


class _Work:
    """Counts loads that are made, and columns of programs that are solved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        self.columns = 0
        solve = MixedIntegerProgram.solve

        def counted_load(*arguments: Any) -> Load:
            self.loads += 1
            return load(*arguments)

        def counted_solve(program: MixedIntegerProgram, **options: Any) -> Any:
            self.columns += program.num_columns
            return solve(program, **options)

        monkeypatch.setattr(rank_loads, "load", counted_load)
        monkeypatch.setattr(MixedIntegerProgram, "solve", counted_solve)


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"stage": 2}, (1000, 8000, 65_536)),
        ({"stage": 3}, (1000, 65_536)),
        ({"stage": 3, "offload_param": True}, (1000,)),
    ],
)
def test_work_hardly_grows_with_the_batch(
    changes: dict[str, Any], batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _Work(monkeypatch)
    spent: list[tuple[int, int]] = []
    for batch in batches:
        before = work.loads, work.columns
        given_problem = _problem(batch, **changes)
        found = make_plan(given_problem)
        assert isinstance(found, Plan)
        assert sum(rank.batch_size for rank in found.ranks) == batch
        assert found.lower_bound <= found.step_seconds <= found.predicted_seconds
        assert found.gap < 0.02
        spent.append((work.loads - before[0], work.columns - before[1]))
    # All loads of one rank would be 2 * 10^5 with 65,536 samples.
    for loads, columns in spent:
        assert loads < 300_000
        assert columns < 300_000, spent


def test_numbers_of_rounds_that_cannot_be_shorter_are_not_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[tuple[Activations, int | None]] = []
    whole = plan._of_any_mode  # pyright: ignore[reportPrivateUsage]

    def counted(problem: PlanProblem, longest: float) -> Any:
        solved.append((problem.activations[0], problem.rounds))
        return whole(problem, longest)

    monkeypatch.setattr(plan, "_of_any_mode", counted)
    found = make_plan(_problem(512, stage=3, activations=("store", "recompute")))
    assert isinstance(found, Plan)
    assert len(solved) == len(set(solved))
    assert len(solved) < 14, solved


def test_plans_are_the_same_again() -> None:
    given_problem = _problem(777, stage=3)
    assert make_plan(given_problem) == make_plan(given_problem)


def test_a_step_below_the_bound_is_denied() -> None:
    given_problem = _problem(512, stage=3, activations=("recompute",), rounds=16)
    found = make_plan(given_problem)
    assert isinstance(found, Plan)
    programs = [StepProgram(given_problem, even=even) for even in (True, False)]
    assert all(one.choose(found.lower_bound * 0.999) is None for one in programs)
    assert any(one.choose(found.step_seconds) for one in programs)
    assert all(not one.covers(found.lower_bound * 0.5) for one in programs)


def test_without_scipy_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_integer, "optimize", None)
    with pytest.raises(PlanError, match="pip install scipy"):
        make_plan(_problem(64))
