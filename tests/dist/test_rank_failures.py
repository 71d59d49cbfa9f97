"""What one rank does wrong, the others are told within seconds; nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_failures as cases
from harness import RankPool
from support.ports import free_port
from support.processes import fresh_environment

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full
TESTS = Path(__file__).resolve().parents[1]


def run_alone(case: Callable[..., Any], *arguments: Any) -> list[Any]:
    """In processes of its own: what hangs there when it is over is in nobody's way."""
    with RankPool(2) as pool:
        return pool.run(case, *arguments, timeout=90)


@pytest.mark.parametrize(("failing", "step"), [(1, 2), pytest.param(0, 0, marks=full)])
def test_an_exception_in_one_ranks_backward(failing: int, step: int) -> None:
    text = run_alone(cases.fails_in_backward, failing, step)[1 - failing]
    assert f"rank {failing} has failed" in text
    assert "ValueError: injected into block 2" in text


@pytest.mark.parametrize(("stage", "fewer"), [(2, 1), pytest.param(2, 0, marks=full)])
def test_fewer_micro_batches_on_one_rank(stage: int, fewer: int) -> None:
    for text in run_alone(cases.fewer_micro_batches, stage, fewer):
        assert "the ranks are out of step" in text


@full
def test_data_that_ends_on_one_rank() -> None:
    assert "rank 1 has failed" in run_alone(cases.data_ends_on_one_rank, 1)[0]


@pytest.mark.parametrize("sizes", [(3, 0), pytest.param((2, 1), marks=full)], ids=str)
def test_a_model_that_changes_its_order_of_layers(sizes: tuple[int, int]) -> None:
    text = run_alone(cases.layers_in_another_order_later, 0, sizes)[1]
    assert "rank 0 has failed" in text
    assert "calls 'blocks.1' again" in text


@full
def test_a_build_that_fails_on_one_rank() -> None:
    assert "rank 0 has failed" in run_alone(cases.build_fails_on_one_rank, 0)[1]


def test_a_rank_that_evaluates_alone_is_told_why_it_waits() -> None:
    said = run_alone(cases.one_rank_evaluates, 0)
    assert not said[1]
    (text,) = said[0]
    assert "the all-gather of '" in text
    assert "Rank 1 stands at " in text
    assert "in one_rank_evaluates." in text
    assert "not there yet: ranks [1]" in text
    assert "engine.synchronize()" in text


def test_all_ranks_that_fail_alike_go_on_and_slow_ones_are_waited_for() -> None:
    with RankPool(2) as pool:
        pool.run(cases.all_fail_alike, timeout=90)
        pool.run(cases.slow_ranks_are_waited_for, timeout=90)


@pytest.mark.parametrize(("how", "code"), [("raise", 1), pytest.param("exit", 3, marks=full)])
def test_a_script_that_ends(tmp_path: Path, how: str, code: int) -> None:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "PYTHONPATH": path,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "dist" / "rank_failures.py"), str(tmp_path), how],
            env=fresh_environment(OMP_NUM_THREADS="1", RANK=str(r), LOCAL_RANK=str(r), **job),
            stderr=(tmp_path / f"errors{r}").open("w"),
        )
        for r in range(2)
    ]
    codes = [rank.wait(timeout=120) for rank in ranks]
    errors = [(tmp_path / f"errors{r}").read_text() for r in range(2)]
    assert codes == [0, code], errors
    assert ("KeyError" in errors[1]) is (how == "raise")
    text = (tmp_path / "text").read_text()
    assert text.startswith("rank 1 has failed, and the others cannot go on without it. It says: ")
