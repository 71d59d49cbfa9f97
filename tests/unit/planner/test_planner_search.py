"""Large batches: what the search leaves out changes nothing, and work hardly grows with them."""

from __future__ import annotations

import ctypes
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_clusters import gpu, host, plan_problems, planned, problem, with_hosts
from scipy import optimize

from hytrain.errors import PlanError
from hytrain.formats.policies import Activations
from hytrain.tools.planner import cost_model, frontier, micro_batch_counts, step_program
from hytrain.tools.planner.accumulation_modes import best_mode, some_rounds
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    Workload,
    fits_rounds,
    sizes_to_choose,
    workload,
)
from hytrain.tools.planner.curves import FREE, Table
from hytrain.tools.planner.frontier import Offer, RankFrontier
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
    cluster = Cluster((host,), FREE, FREE, 1.25)
    policies: tuple[Activations, ...] = ("store", "recompute")
    whole = PlanProblem(cluster, Model("m", 2, GB), 5, stage=3, activations=policies)
    found = planned(whole)
    assert [(rank.batch_size, rank.microbatch_size) for rank in found.ranks] == [(3, 3), (2, 2)]
    assert found.predicted_seconds == pytest.approx(0.1888)


# -- workloads ---------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    random_problem=plan_problems(most_ranks=2, most_batch=120),
    share=st.floats(0.0, 1.2),
    ranges=st.sampled_from((1, 5, 64)),
)
def test_offers_are_at_least_as_good_as_every_workload(
    random_problem: PlanProblem, share: float, ranges: int
) -> None:
    collectives = Collectives.of(random_problem, even=False)
    host, gpu = random_problem.cluster.ranks[0]
    policies = random_problem.activations
    every = [
        workload(random_problem, gpu, collectives, samples, min(size, samples), policy)
        for policy in policies
        for samples in range(1, random_problem.batch + 1)
        for size in sizes_to_choose(random_problem, gpu, samples)
        if fits_rounds(random_problem, samples, size)
    ]
    step = share * max((work.compute for work in every), default=1.0)
    copied = min(step * gpu.copy_rate, step * host.bandwidth / 2.0, host.memory_bytes)
    able = [
        work
        for work in every
        if work.compute <= step and work.room >= 0.0 and work.offloaded <= copied
    ]
    rank = RankFrontier(random_problem, host, gpu, collectives, step)
    idle = workload(random_problem, gpu, collectives, 0, 0, policies[0])
    is_idle = random_problem.allow_idle and idle.room >= 0.0 and idle.compute <= step
    most = max((work.batch for work in able), default=0 if is_idle else -1)
    assert rank.most_samples(step) == most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "_MOST_RANGES", ranges)
        offers = rank.offers(step, 0, bound=True)
    for work in able:
        assert any(_is_as_good(offer, work) for offer in offers), work


def _is_as_good(offer: Offer, work: Workload) -> bool:
    own = offer.work
    if own.activations != work.activations or not own.batch <= work.batch <= offer.samples:
        return False
    rounded = 1.0 + 1e-12  # sums of as many equal times in another order
    is_fast = own.compute <= work.compute * rounded and own.startup <= work.startup * rounded
    return is_fast and own.room >= work.room and own.end_room >= work.end_room


# -- work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "batches"),
    [
        ({"stage": 2}, (1000, 65_536)),
        ({"stage": 3}, (1000, 65_536)),
        ({"stage": 3, "offload_param": True}, (1000,)),
    ],
)
def test_work_hardly_grows_with_the_batch(
    changes: dict[str, Any], batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def counted(*arguments: Any) -> Workload:
        nonlocal made
        made += 1
        return workload(*arguments)

    for module in (frontier, cost_model, micro_batch_counts):
        monkeypatch.setattr(module, "workload", counted)
    for batch in batches:
        made = 0
        found = planned(_problem(batch, **changes))
        assert sum(rank.batch_size for rank in found.ranks) == batch
        assert found.lower_bound <= found.step_seconds <= found.predicted_seconds
        assert found.limits_gap < 0.02
        # All workloads of one rank would be 2 * 10^5 with 65,536 samples.
        assert made < 300_000


def test_numbers_of_rounds_that_cannot_be_shorter_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[int | None] = []
    whole = micro_batch_counts.search_program

    def counted(program: StepProgram, worst: float) -> Any:
        found = whole(program, worst)
        if found.trail:
            solved.append(program.problem.rounds)
        return found

    monkeypatch.setattr(micro_batch_counts, "search_program", counted)
    policies: tuple[Activations, ...] = ("store", "recompute")
    found = planned(_problem(512, stage=3, activations=policies))
    assert found.shortest_step < 1.005 * found.lower_bound
    assert 0 < len(solved) < 14, solved


def test_in_candidate_rounds_is_every_number_that_comes_to_the_batch() -> None:
    """Of two ranks with up to three samples at once, by trying all micro-batches."""
    for batch in range(1, 40):
        problem = _of_two(batch)
        able = {
            number
            for number in range(1, batch + 1)
            for sizes in itertools.product(range(4), repeat=2)
            if sum((number - 1) * size + (size > 0) for size in sizes) <= batch
            and batch <= number * sum(sizes)
        }
        assert able <= set(micro_batch_counts.candidate_rounds(problem))


def _of_two(batch: int) -> PlanProblem:
    whole = _problem(batch, stage=3)
    gpu = replace(_gpu("x", 24, 1.0), sizes=(1, 2, 3), most_samples=3)
    host = replace(whole.cluster.hosts[0], gpus=(gpu, gpu))
    return with_hosts(whole, host)


def test_no_step_of_some_rounds_is_shorter_than_its_compute() -> None:
    given_problem = _problem(512, stage=3, activations=("recompute",))
    numbers = micro_batch_counts.candidate_rounds(given_problem)
    shortest = micro_batch_counts.shortest_steps(given_problem, "recompute", numbers, even=True)
    for number, least in list(zip(numbers, shortest, strict=True))[3:20:4]:
        found = make_plan(replace(given_problem, rounds=number))
        if isinstance(found, Plan):
            assert least <= found.step_seconds
            assert not found.even or least >= 0.8 * found.step_seconds


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
        most_samples=most,
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
