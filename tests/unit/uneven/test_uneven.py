"""The exact solver of Cephalo's problem: published optima, its slow twin, and what is missing."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shared_data import shared_folder

from hytrain.errors import PlanError
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.uneven.problem import (
    UnevenCase,
    UnevenGpu,
    UnevenProblem,
    extended,
    grown,
    layer_time,
    read_cases,
)
from hytrain.tools.uneven.solver import Assignment, solve, state_shares

# -- the slow twin of solver.py ----------------------------------------------------------------

_Point = tuple[float, float]


def solve_slowly(problem: UnevenProblem) -> _Point | None:
    """(least time, least memory at that time); None where nothing fits.

    For each number of samples that the GPUs so far may compute it keeps all pairs (time, memory)
    of which neither is worse than another's.
    """
    reached: dict[int, list[_Point]] = {0: [(0.0, 0.0)]}
    for gpu in problem.gpus:
        longer: dict[int, list[_Point]] = {}
        choices = _choices(problem, gpu)
        for done, points in reached.items():
            for batch, seconds, memory in choices:
                if done + batch <= problem.batch:
                    sums = [(max(seconds, so_far), memory + used) for so_far, used in points]
                    longer.setdefault(done + batch, []).extend(sums)
        reached = {done: _undominated(points) for done, points in longer.items()}
    fitting = [point for point in reached.get(problem.batch, []) if point[1] < problem.budget]
    return min(fitting, default=None)


def _choices(problem: UnevenProblem, gpu: UnevenGpu) -> list[tuple[int, float, float]]:
    """(samples, time, memory) of all that one GPU can do."""
    limit = problem.usable * gpu.capacity
    choices: list[tuple[int, float, float]] = []
    for batch in range(1, problem.batch + 1):
        for size in range(1, problem.batch + 1):
            memory = gpu.memory[size - 1]
            if memory <= limit:
                time = float(layer_time(problem, gpu, size, -(-batch // size)))
                choices.append((batch, time, memory))
    return choices


def _undominated(points: list[_Point]) -> list[_Point]:
    kept: list[_Point] = []
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


# -- the exact solver of Cephalo's problem -----------------------------------------------------

MOST = 16
"""Samples of a batch."""


def gpu(name: str, ms_per_sample: float, gib_per_sample: float, capacity: float) -> UnevenGpu:
    return UnevenGpu(
        name=name,
        forward=extended((), ms_per_sample, 0.0, MOST),
        backward=extended((), 2.0 * ms_per_sample, 0.0, MOST),
        memory=extended((), gib_per_sample, 2.0, MOST),
        capacity=capacity,
    )


def problem(*gpus: UnevenGpu, batch: int, **changes: Any) -> UnevenProblem:
    return replace(UnevenProblem(gpus=gpus, batch=batch, parameters=2**26), **changes)


def found(result: Assignment | Infeasible) -> Assignment:
    assert isinstance(result, Assignment), result
    return result


def check_plan(given: UnevenProblem, plan: Assignment) -> None:
    """The plan keeps every constraint and takes the time that it says."""
    assert sum(plan.batch_sizes) == given.batch
    times: list[float] = []
    memory: list[float] = []
    rows = zip(
        given.gpus, plan.batch_sizes, plan.microbatch_sizes, plan.num_microbatches, strict=True
    )
    for one, batch, size, number in rows:
        assert batch >= 1
        assert number * size >= batch
        times.append(layer_time(given, one, size, number))
        memory.append(one.memory[size - 1])
        assert memory[-1] <= given.usable * one.capacity
    assert plan.time == max(times)
    assert sum(memory) < given.budget
    assert math.isclose(plan.memory, sum(memory), abs_tol=1e-9)


# -- against what is known ---------------------------------------------------------------------


def _cases() -> list[tuple[UnevenCase, dict[str, Any]]]:
    folder = shared_folder("plan_cases", "uneven")
    expected = json.loads((folder / "expected.json").read_text())
    return list(zip(read_cases(folder), expected, strict=True))


def test_the_published_cases_have_their_optima() -> None:
    cases = _cases()
    assert len(cases) >= 7
    for case, expected in cases:
        result = solve(case.problem)
        if expected["exact"] is None:
            assert isinstance(result, Infeasible)
            assert result.missing > 0.0
            continue
        plan = found(result)
        check_plan(case.problem, plan)
        assert plan.time == pytest.approx(expected["exact"]["time"], rel=1e-12)
        assert plan.memory == pytest.approx(expected["exact"]["mem"], rel=1e-12)
        assert case.problem.budget == pytest.approx(expected["exact"]["budget"], rel=1e-12)


def test_the_small_published_cases_by_the_slow_twin() -> None:
    for case, expected in _cases()[:3]:
        known = expected["exact"]
        # Four GPUs and a batch of 32 take seconds; a quarter of the batch has the same shape.
        small = replace(case.problem, batch=case.problem.batch // 4)
        slow = solve_slowly(small)
        result = solve(small)
        assert (slow is None) == (known is None) == isinstance(result, Infeasible)
        if slow is not None:
            plan = found(result)
            assert (plan.time, plan.memory) == pytest.approx(slow)


def test_what_is_missing_in_the_infeasible_case() -> None:
    case = next(case for case, expected in _cases() if expected["exact"] is None)
    result = solve(case.problem)
    assert isinstance(result, Infeasible)
    # 16 B of 6 848 905 216 parameters, C(1) of four GPUs, three quarters of 115.49 GiB.
    missing = 16 * 6848905216 / 2**30 + 4 * (2.0407495498657227 + 2.0) - 0.75 * 115.49
    assert result.missing == pytest.approx(missing)
    assert f"{missing:.2f} GiB are missing" in result.reason


def test_64_gpus_and_a_batch_of_1024_take_less_than_half_a_second(tmp_path: Path) -> None:
    folder = shared_folder("plan_cases", "uneven")
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    last = json.loads((folder / "expected.json").read_text())[-1]
    (tmp_path / "expected.json").write_text(json.dumps([{**last, "global_batch": 1024}]))
    (case,) = read_cases(tmp_path)
    assert len(case.gpus) == 64
    seconds: list[float] = []
    while len(seconds) < 10 and min(seconds, default=1.0) >= 0.5:
        begin = time.process_time()  # a busy machine takes its time, but no more of the CPU's
        check_plan(case.problem, found(solve(case.problem)))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.5


def test_a_batch_is_no_larger_than_its_tables_may_be(tmp_path: Path) -> None:
    for name in ("latencies", "memory", "gpu_memory_gb"):
        (tmp_path / f"{name}.json").write_text("{}")
    case = {"model": "a", "dtype": "fp32", "gpus": [], "global_batch": 10**15}
    (tmp_path / "expected.json").write_text(json.dumps([case]))
    with pytest.raises(PlanError, match=r"case 0 .*plans are made for 65536 at most"):
        read_cases(tmp_path)


def test_unequal_shares_fit() -> None:
    for case, expected in _cases():
        if expected["exact"] is None:
            continue
        plan = found(solve(case.problem))
        shares = state_shares(case.problem, plan)
        assert sum(shares) == pytest.approx(1.0)
        for one, share, size in zip(case.problem.gpus, shares, plan.microbatch_sizes, strict=True):
            used = one.memory[size - 1] + share * case.problem.state
            assert used <= case.problem.usable * one.capacity + 1e-9


# -- against the slow twin ---------------------------------------------------------------------

# Whole and half numbers: their sums are exact in any order, so that a limit is met by both or none.
_halves = st.integers(min_value=0, max_value=12).map(lambda number: number / 2)


@st.composite
def uneven_problems(draw: st.DrawFn, most_gpus: int, most_batch: int) -> UnevenProblem:
    """Up to three types of GPU; what was measured need not rise; collectives, tight memory."""
    batch = draw(st.integers(1, most_batch))

    def profile(least: float = 0.0) -> tuple[float, ...]:
        measured = draw(st.lists(_halves, max_size=min(3, batch)))
        line = extended(measured, draw(_halves), draw(_halves), batch)
        return tuple(value + least for value in line)

    types = [
        UnevenGpu(str(number), profile(), profile(), profile(0.5), draw(st.integers(1, 40)) / 2)
        for number in range(3)
    ]
    return UnevenProblem(
        gpus=tuple(draw(st.lists(st.sampled_from(types), min_size=1, max_size=most_gpus))),
        batch=batch,
        parameters=draw(st.integers(1, 6)) * 2**25,  # halves of a GiB of state
        all_gather=draw(_halves),
        reduce_scatter=draw(_halves),
        accumulation=draw(_halves),
        usable=draw(st.sampled_from((0.5, 1.0))),
    )


@settings(max_examples=400, deadline=None)
@given(random=uneven_problems(most_gpus=4, most_batch=9))
def test_it_agrees_with_its_slow_twin(random: UnevenProblem) -> None:
    slow = solve_slowly(random)
    result = solve(random)
    if slow is None:
        assert isinstance(result, Infeasible)
        return
    plan = found(result)
    check_plan(random, plan)
    assert (plan.time, plan.memory) == pytest.approx(slow)


# -- by hand -----------------------------------------------------------------------------------


def test_batches_follow_the_speeds() -> None:
    plan = found(solve(problem(gpu("fast", 1.0, 0.01, 64), gpu("slow", 3.0, 0.01, 64), batch=8)))
    assert plan.batch_sizes == (6, 2)
    assert plan.time == 6 * 1.0 + 6 * (1.0 + 2.0)


def test_recompute_and_every_further_microbatch_are_charged() -> None:
    only = gpu("a", 1.0, 0.0, 64)
    # F = 3 * 2, B = 3 * 2 + 3 * 4 + 2 * 10.
    assert layer_time(problem(only, batch=6), only, 2, 3) == 6.0 + 6.0 + 12.0 + 20.0


def test_collectives_bound_a_fast_gpu_and_cost_more_where_shards_must_be_unequal() -> None:
    only = gpu("a", 1.0, 1.0, 16.0)
    slow_network = problem(only, batch=6, all_gather=100.0, reduce_scatter=60.0)
    # 1 GiB of state: of the 12 that may be used, 11 are left; C(9) is 11, C(10) is 12.
    assert layer_time(slow_network, only, 9, 1) == 100.0 + 160.0
    assert layer_time(slow_network, only, 10, 1) == 1.25 * 260.0


def test_little_memory_takes_small_microbatches() -> None:
    # 12 GiB may be used, 1 of them for state, 2 for C(0): 9 samples of 1 GiB at once.
    plan = found(solve(problem(gpu("a", 1.0, 1.0, 16.0), batch=16)))
    assert plan.num_microbatches == (2,)
    assert plan.microbatch_sizes == (8,)


def test_a_list_is_extended_by_its_line_or_its_last_growth() -> None:
    assert extended((3.0, 5.0), 2.0, 0.5, 3) == (3.0, 5.0, 6.5)
    assert grown([9.0, 1.0, 1.5, 2.0, 4.0, 5.0], 8)[-1] == pytest.approx(7.0)
    assert grown([1.0, 3.0], 4)[-1] == pytest.approx(7.0)
    assert grown([2.0], 3)[-1] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("impossible", "words"),
    [
        (problem(gpu("a", 1, 1, 64), gpu("a", 1, 1, 64), batch=1), "too small for 2 GPUs"),
        (
            problem(gpu("a", 1, 1, 64), gpu("tiny", 1, 1, 3), batch=4),
            r"GPU 1 \(tiny\) needs 3.00 GiB .* 2.25: 0.75 GiB are missing",
        ),
        (
            problem(gpu("a", 1, 1, 16), batch=4, parameters=2**30),
            r"16.00 GiB for state and at least 3.00 .* 12.00: 7.00 GiB are missing",
        ),
    ],
)
def test_what_does_not_fit_is_said(impossible: UnevenProblem, words: str) -> None:
    result = solve(impossible)
    assert isinstance(result, Infeasible)
    assert re.search(words, result.reason), result.reason


def test_a_full_budget_is_none_left() -> None:
    # C + state = 12 GiB is not below 0.75 * 16.
    exact = problem(gpu("a", 1, 9, 16), batch=1)
    assert isinstance(solve(exact), Infeasible)
    assert isinstance(solve(replace(exact, parameters=2**25)), Assignment)


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": ()},
        {"batch": 0},
        {"parameters": 0},
        {"all_gather": -1.0},
        {"gpus": (gpu("a", -1, 1, 64),)},
        {"gpus": (gpu("a", 1, math.nan, 64),)},
    ],
)
def test_what_is_no_problem_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        replace(problem(gpu("a", 1, 1, 64), batch=1), **change)
