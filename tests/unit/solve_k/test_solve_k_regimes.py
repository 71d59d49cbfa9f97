"""The grid of models, batches and cores: its cells, and a whole run of one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.solve_k import regimes
from experiments.solve_k.regime_cells import Cell


def test_cells() -> None:
    assert Cell.of("0.37B/4x512/16") == Cell("0.37B", 4, 512, 16, clips=True)
    assert Cell.of("toy/2x16/2/noclip") == Cell("toy", 2, 16, 2, clips=False)
    graphs = Cell("toy", 2, 16, 2, clips=False, compile="reduce-overhead", whole=True)
    assert Cell.of("toy/2x16/2/noclip/graphs/whole") == graphs
    assert Cell.of("toy/2x16/2/compiled").compile == "default"


@pytest.mark.parametrize(
    "text", ["7B/1x1/1", "toy", "toy/2/2", "toy/2x16/x", "toy/2x16/2/clip", "toy/2x16/2/whole"]
)
def test_other_cells_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match=r"is not MODEL/BATCHxTOKENS/CORES"):
        Cell.of(text)


@pytest.mark.experiment
def test_a_cell(tmp_path: Path) -> None:
    command = [sys.executable, regimes.__file__, "--cells", "toy/2x16/2", "--device", "cpu"]
    command += ["--out", str(tmp_path), "--steps", "20", "--stay", "10", "--rounds", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    cell = json.loads((tmp_path / "regimes.json").read_text())["cells"]["toy/2x16/2"]
    assert str(cell["solved"]) in cell["fixed"]
    assert cell["fixed"][str(cell["best"])] == min(cell["fixed"].values())
    assert cell["solved_over_best"] >= 1.0
    beside = cell["beside"]
    assert beside["hytrain_over_all_gpu"] > 0 < beside["hytrain_over_compute"]
    assert cell["compute"] == beside["compute"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| toy/2x16/2 |"))
    assert f"{beside['hytrain_over_all_gpu']:.3f}" in row
