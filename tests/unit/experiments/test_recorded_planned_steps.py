"""Plans of launch-bound models beside the steps that GPUs have taken."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from experiments.solve_k import planned_steps
from experiments.solve_k.regime_cells import Cell
from hytrain.formats.profile_file import LayerSample, OutsideSample, ProfileFile

PARTS = ("0.0", "0.5", "1.0")


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
