"""Large batches: what the search leaves out changes nothing, and work hardly grows with them."""

from __future__ import annotations

import ctypes
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from planner_clusters import gpu, host, plan_problems, planned, problem
from scipy import optimize

from hytrain.errors import PlanError
from hytrain.formats.policies import Activations
from hytrain.tools.planner import step_program
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    workload,
)
from hytrain.tools.planner.curves import FREE, Table
from hytrain.tools.planner.micro_batch_counts import best_mode, some_rounds
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import Model, PlanProblem
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


@settings(max_examples=3, deadline=None)
@given(random_problem=plan_problems(most_ranks=3, most_batch=12))
def test_what_is_not_worked_out_would_not_have_been_shorter(random_problem: PlanProblem) -> None:
    """One micro-batch after another, by all numbers of them, each worked out to its end."""
    policies: tuple[Activations, ...] = ("store", "recompute")
    stage_3 = replace(random_problem, stage=3, rounds=None, activations=policies)
    assume(stage_3.needs_rounds)
    fast = make_plan(stage_3)
    slow = best_mode(
        stage_3, lambda one, _: make_plan(one), lambda one: some_rounds(one, make_plan)
    )
    if isinstance(slow, Plan):  # of fewer numbers, none of which need fit
        assert isinstance(fast, Plan)
        # Less of a gain is not searched for.
        assert fast.predicted_seconds <= slow.predicted_seconds * 1.004


# -- workloads ---------------------------------------------------------------------------------


# -- work --------------------------------------------------------------------------------------


def test_plans_are_the_same_again() -> None:
    given_problem = _problem(777, stage=3)
    assert make_plan(given_problem) == make_plan(given_problem)


def test_a_step_below_the_bound_is_denied() -> None:
    given_problem = _problem(512, stage=3, activations=("recompute",), rounds=16)
    found = planned(given_problem)
    programs = [StepProgram(given_problem, even=even) for even in (True, False)]
    assert all(one.choose(found.lower_bound * 0.999) is None for one in programs)
    assert any(one.choose(found.step_seconds) for one in programs)
    assert all(one.spare_samples(found.lower_bound * 0.5) < 0 for one in programs)


def test_without_scipy_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_program, "optimize", None)
    with pytest.raises(PlanError, match="pip install scipy"):
        make_plan(_problem(64))


def test_what_the_solver_prints_is_not_in_the_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    solve = optimize.milp

    def talking(*arguments: Any, **options: Any) -> Any:
        ctypes.CDLL(None).puts(b"solved")
        return solve(*arguments, **options)

    monkeypatch.setattr(step_program.optimize, "milp", talking)
    print("before")
    planned(problem(host(gpu("a", 80, 1.0))))
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


# -- plans where only samples matter -----------------------------------------------------------

PARAMETERS = 3 * 10**9


def device(name: str, launch: float, ms: float, most: int) -> GpuProfile:
    """A micro-batch of n samples takes ``launch + n * ms`` forward, twice ``ms`` a sample back."""
    return GpuProfile(
        name=name,
        memory_bytes=10**15,
        forward_ms=Table(tuple((float(n), launch + ms * n) for n in (1, 2, 8, 24))),
        backward_ms=Table(((1.0, 2.0 * ms),)),
        peak_bytes=Table(((1.0, 1e9),)),
        idle_bytes=0,
        update_rate=1e15,
        copy_rate=2e10,
        sizes=tuple(range(1, most + 1)),
    )


def only_samples_matter(seed: int) -> PlanProblem:
    """Two GPUs with room for everything, and a batch that is dealt in whole micro-batches first."""
    draw = random.Random(seed)
    launch, most = draw.uniform(0.0, 5.0), draw.randint(2, 24)
    gpus = tuple(device(name, launch, draw.uniform(0.5, 4.0), most) for name in "ab")
    host = Host("host", gpus, 16, 10**15, 1e11, Table(((16.0, 4e9),)))
    return PlanProblem(
        Cluster((host,), FREE, FREE),
        Model("m", 24, PARAMETERS, 4 * 2**20),
        draw.randint(65, 200),
        activations=("keep",),
    )


def best_of_all(problem: PlanProblem) -> float:
    """The shortest step of all ways to deal the samples, each with its fastest micro-batch."""
    none = Collectives(0.0, 0.0)

    def fastest(gpu: GpuProfile, samples: int) -> float:
        works = (
            workload(problem, gpu, none, samples, size, "keep") for size in gpu.micro_sizes(samples)
        )
        return min((work.compute for work in works), default=0.0)

    first, second = (gpu for _, gpu in problem.cluster.ranks)
    return min(
        max(fastest(first, samples), fastest(second, problem.batch - samples))
        for samples in range(problem.batch + 1)
    )


def test_it_finds_the_best_deal_and_its_bound_holds() -> None:
    for seed in range(8):
        problem = only_samples_matter(seed)
        best, plan = best_of_all(problem), make_plan(problem)
        assert isinstance(plan, Plan)
        assert sum(rank.batch_size for rank in plan.ranks) == problem.batch
        assert best * (1.0 - 1e-6) <= plan.step_seconds < best * (1.0 + 1e-4)
        assert plan.lower_bound <= best * (1.0 + 1e-6)
