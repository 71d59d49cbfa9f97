"""Two ranks between phases: offload_states(), and random numbers after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_phases as cases
from harness import RankPools
from support.resume import Run

pytestmark = pytest.mark.timeout(240)

RUNS = [
    Run(stage=1, fractions=(0.5, 0.5), gpu_fraction=0.5),
    Run(stage=2, fractions=(0.7, 0.3), gpu_fraction=1.0, accumulation=2, groups=True),
    Run(stage=3, fractions=(0.3, 0.7), gpu_fraction=0.5, accumulation=2),
    Run(stage=3, fractions=(0.5, 0.5), gpu_fraction=0.0, clipping=0.0, check_overflow=False),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_states_leave_and_come_back(ranks: RankPools, run: Run) -> None:
    ranks(2).run(cases.offloads, run)


@pytest.mark.parametrize("stage", [2, 3])
def test_dropout_goes_on_on_each_rank(ranks: RankPools, stage: int, tmp_path: Path) -> None:
    first, second = ranks(2).run(cases.resumes_dropout, tmp_path, Run(stage=stage))
    assert first != second
