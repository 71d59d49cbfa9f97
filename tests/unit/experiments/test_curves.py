"""The convergence experiment: how curves are held against each other, and its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.convergence import report
from experiments.convergence.cases import (
    HYTRAIN,
    ZERO2,
    ZERO2_EAGER,
    Case,
    all_cases,
)
from experiments.convergence.curves import (
    WINDOW,
    largest_difference,
    last_common_step,
    smoothed,
)


def test_smoothed_differences() -> None:
    noise = np.random.default_rng(0).normal(size=500)
    one, other = 3.0 + noise, 3.0 + noise + 0.25 * (np.arange(500) >= 300)
    assert smoothed(one)[7] == pytest.approx(one[7 : 7 + WINDOW].mean())
    largest, mean = largest_difference(one.tolist(), other.tolist())
    assert largest == pytest.approx(0.25)
    assert mean == pytest.approx(0.25 * (101 + 49.5) / 401, rel=0.02)
    with pytest.raises(ValueError, match="fewer than the 100"):
        largest_difference(one.tolist(), [1.0] * 99)
    assert last_common_step([{"0": 1.0, "500": 1.0, "1000": 1.0}, {"0": 1.0, "500": 1.0}]) == 500


def _training(case: Case, offset: float, steps: int = 400) -> dict[str, Any]:
    losses = [4.0 - 0.005 * step + offset for step in range(steps)]
    held_out = {str(step): 4.0 - 0.005 * step + offset for step in range(0, steps + 1, 100)}
    about = {"kind": case.kind, "seed": case.seed, "status": "ok" if steps == 400 else "stopped"}
    return {**about, "losses": losses, "held_out": held_out, "k": None}


def test_the_tables_of_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = {ZERO2: 0.0, ZERO2_EAGER: 0.005, HYTRAIN: 0.001}
    trainings = [
        _training(case, offsets.get(case.kind, 0.002) + 0.1 * case.seed,
                  300 if case.kind == ZERO2 else 400)
        for case in all_cases()
    ]  # fmt: skip
    result = {"hardware": {"gpu": None}, "options": {"model": "m"}, "trainings": trainings}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert f"| {ZERO2} / {ZERO2_EAGER} | 1 | 300 | 0.0050 | 0.0050 |" in text
    assert f"| {HYTRAIN} / {ZERO2} | 0 | 300 | 0.0010 | 0.0010 |" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {HYTRAIN}, 8bit"))
    assert row.endswith("| 0.2000 | +0.0010 | 0.0010 |")
    assert f"{ZERO2}, seed 0: stopped after 300" in text
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
