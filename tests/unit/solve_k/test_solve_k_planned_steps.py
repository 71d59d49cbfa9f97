"""Plans of launch-bound models beside their steps, in rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.solve_k import planned_steps
from experiments.solve_k.planned_steps import Measured, Round, row

PARTS = ("0.0", "0.5", "1.0")


def _round(predicted: float, seconds: float) -> Round:
    found: Any = None
    measured = Measured({0.5: seconds}, {}, 1, None)
    return Round(found, measured, {0.5: predicted})


def test_a_ratio_is_of_one_rounds_times() -> None:
    """The medians' own ratio would be 1: a host that drifts is another one in each round."""
    rounds = [_round(0.1, 0.2), _round(0.2, 0.4), _round(0.3, 0.1)]
    found = row("toy/2x16", 0.5, rounds)
    assert found == ["toy/2x16", "50%", "200.0", "200.0", "0.500", "0.500", "3.000"]


@pytest.mark.experiment
def test_rounds_of_a_toy(tmp_path: Path) -> None:
    command = [sys.executable, planned_steps.__file__, "--workloads", "toy/2x16"]
    command += ["--device", "cpu", "--rounds", "2", "--seconds", "0.5", "--out", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    rounds = json.loads((tmp_path / "planned_steps.json").read_text())["workloads"]["toy/2x16"]
    assert len(rounds) == 2
    for each in rounds:
        assert set(each["predicted"]) == set(each["seconds"]) == set(PARTS)
        assert min(*each["predicted"].values(), *each["seconds"].values()) > 0.0
        assert each["compute"] > 0.0
        assert each["profile"]["model"]["name"] == "toy"
    lines = [line for line in done.stdout.splitlines() if line.startswith("| toy/2x16 |")]
    assert [line.split("|")[2].strip() for line in lines] == ["0%", "50%", "100%"]
