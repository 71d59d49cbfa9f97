"""The grid of models, batches and cores: its cells, and a whole run of one."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.common.sizes import Size
from experiments.solve_k import regimes
from experiments.solve_k.regime_cells import SHAPES, Cell, grid


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


@pytest.mark.parametrize("model", [model for model in SHAPES if model != "toy"])
def test_a_model_has_as_many_parameters_as_its_name_says(model: str) -> None:
    blocks, hidden, intermediate = SHAPES[model]
    size = Size(layers=blocks, hidden=hidden, intermediate=intermediate, heads=1, vocab=32000)
    digits = len(model.removesuffix("B").partition(".")[2])
    assert f"{size.num_parameters / 1e9:.{digits}f}B" == model


def test_the_grid_has_every_pair() -> None:
    cells = [Cell.of(text) for text in grid()]
    assert len(set(cells)) == len(cells) == 40
    columns = [[(cell.model, cell.tokens * cell.batch), cell.cores, cell.clips] for cell in cells]
    for first, second in itertools.combinations(range(3), 2):
        one, other = ({row[at] for row in columns} for at in (first, second))
        assert {(row[first], row[second]) for row in columns} == set(itertools.product(one, other))


@pytest.mark.experiment
def test_two_cells_of_one_process(tmp_path: Path) -> None:
    cells = ["toy/2x16/1/noclip", "toy/2x16/1"]
    command = [sys.executable, regimes.__file__, "--cells", *cells, "--device", "cpu"]
    command += ["--out", str(tmp_path), "--steps", "20", "--stay", "10", "--rounds", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250)
    found = json.loads((tmp_path / "regimes.json").read_text())["cells"]
    assert list(found) == cells
    cell = found["toy/2x16/1"]
    assert found[cells[0]]["seconds"]["imports"] > 0.0 == cell["seconds"]["imports"]
    assert cell["stayed"] == 10
    assert str(cell["solved"]) in cell["fixed"]
    assert cell["fixed"][str(cell["best"])] == min(cell["fixed"].values())
    for each in found.values():
        is_best = each["best"] == each["solved"]
        assert each["sweep_over_best"] >= 1.0
        assert (each["sweep_over_best"] == 1.0) == is_best
        assert len(each["duel"]) == (0 if is_best else 9)
        over = 1.0 if is_best else statistics.median(each["duel"])
        assert each["solved_over_best"] == over
    beside = cell["beside"]
    assert beside["hytrain_over_all_gpu"] > 0 < beside["hytrain_over_compute"]
    assert cell["compute"] == beside["compute"]
    row = next(line for line in done.stdout.splitlines() if line.startswith("| toy/2x16/1 |"))
    for prefix in ("", "queued_"):
        assert f"{beside[f'{prefix}hytrain_over_all_gpu']:.3f}" in row
        assert f"{beside[f'{prefix}hytrain_over_compute']:.3f}" in row
