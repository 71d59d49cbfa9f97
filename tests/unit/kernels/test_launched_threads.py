"""The comparison of launchers ends in time, with what there is, and no process stays behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.processes import fresh_environment

SCRIPT = Path(__file__).resolve().parents[3] / "experiments/kernel_bench/launched_threads.py"
WAYS = ("plain", "plain again", "OMP_NUM_THREADS=1", "torchrun", "by hand, 1")

pytestmark = pytest.mark.experiment


def _run(turns: int, budget_seconds: float) -> tuple[str, float]:
    arguments = ["--turns", turns, "--by-hand", 1, "--budget-seconds", budget_seconds]
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=fresh_environment(PYTHONPATH=str(SCRIPT.parents[2])),
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(SCRIPT) in _command(p)]
    assert not left
    return ended.stdout, time.monotonic() - begin


def _command(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []


def test_each_way_is_measured() -> None:
    output, _ = _run(turns=2, budget_seconds=200)
    for way in WAYS:
        assert f"\n{way:18s} " in output
    assert output.count("2 turns; idle") == len(WAYS)
    assert "noise: " in output


def test_a_budget_that_is_too_short_is_kept() -> None:
    output, seconds = _run(turns=2, budget_seconds=10)
    assert seconds < 15
    assert output.count("is left out: it has not") + output.count("turns; idle") >= len(WAYS)
