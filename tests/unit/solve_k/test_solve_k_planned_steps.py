"""Plans of launch-bound models beside their steps, in rounds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.solve_k import planned_steps
from experiments.solve_k.planned_steps import HEADER, Measured, Round, row
from experiments.solve_k.regime_cells import Cell
from hytrain.formats.profile_file import LayerSample, OutsideSample, ProfileFile

PARTS = ("0.0", "0.5", "1.0")


def _round(predicted: float, alone: float, seconds: float) -> Round:
    found: Any = None
    measured = Measured(seconds, found, None)
    return Round(found, {0.5: measured}, {0.5: predicted}, {0.5: alone}, 1)


def test_a_ratio_is_of_one_rounds_times() -> None:
    """The medians' own ratio would be 1: a host that drifts is another one in each round."""
    rounds = [_round(0.1, 0.4, 0.2), _round(0.2, 0.4, 0.4), _round(0.3, 0.1, 0.1)]
    found = row("toy/2x16", 0.5, rounds)
    assert found[:4] == ["toy/2x16", "50%", "200.0", "200.0"]
    assert found[4:7] == ["0.500", "0.500", "3.000"]
    assert found[7:] == ["1.000", "1.000", "2.000"]
    assert len(found) == len(HEADER)


RUNS: list[Any] = json.loads(
    Path(planned_steps.__file__).with_name("planned_steps.json").read_text()
)["runs"]
WORKLOADS = sorted({workload for run in RUNS for workload in run["workloads"]})


def _ratios(one: Any, cell: Cell, part: str) -> tuple[float, float]:
    """Predicted over measured: by the passes between the steps, and by the profile alone."""
    found = ProfileFile.model_validate_json(json.dumps(one["profile"]))
    threaded = planned_steps.with_threads(found, one["threads"])
    of_part = one["parts"][part]
    passes = (
        LayerSample.model_validate(of_part["layer"]),
        OutsideSample.model_validate(of_part["outside"]),
    )
    by_passes, alone = (
        planned_steps.predict(each, cell, float(part)) / of_part["seconds"]
        for each in (planned_steps.with_passes(threaded, passes), threaded)
    )
    return by_passes, alone


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_plans_of_recorded_profiles_are_near_the_steps(workload: str, part: str) -> None:
    """Of all machines together: one that drifts for tens of seconds is off by as much."""
    by_passes: list[float] = []
    alone: list[float] = []
    for run in RUNS:
        cell = Cell.of(f"{workload}/{run['hardware']['cores']}")
        ratios = [_ratios(one, cell, part) for one in run["workloads"][workload]]
        assert len(ratios) >= 3
        # A single machine's medians may be off by what its launches were.
        assert statistics.median(each[0] for each in ratios) == pytest.approx(1.0, abs=0.12)
        assert statistics.median(each[1] for each in ratios) == pytest.approx(1.0, abs=0.18)
        by_passes += [each[0] for each in ratios]
        alone += [each[1] for each in ratios]
    assert statistics.median(by_passes) == pytest.approx(1.0, abs=0.08)
    assert statistics.median(alone) == pytest.approx(1.0, abs=0.07)


@pytest.mark.experiment
def test_rounds_of_a_toy(tmp_path: Path) -> None:
    command = [sys.executable, planned_steps.__file__, "--workloads", "toy/2x16"]
    command += ["--device", "cpu", "--rounds", "2", "--seconds", "0.5", "--out", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
    rounds = json.loads((tmp_path / "planned_steps.json").read_text())["workloads"]["toy/2x16"]
    assert len(rounds) == 2
    for each in rounds:
        assert each["profile"]["model"]["name"] == "toy"
        assert set(each["parts"]) == set(PARTS)
        for part in each["parts"].values():
            predicted = part["predicted"], part["predicted_by_the_profile_alone"]
            assert min(*predicted, part["seconds"]) > 0.0
            assert part["layer"]["samples"] == 2
        assert each["parts"]["0.0"]["update_rate"] > 0.0
        assert each["parts"]["1.0"]["update_rate"] is None
    lines = [line for line in done.stdout.splitlines() if line.startswith("| toy/2x16 |")]
    # After each round the table so far.
    assert [line.split("|")[2].strip() for line in lines] == ["0%", "50%", "100%"] * 2
