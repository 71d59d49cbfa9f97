"""DeepSpeed's monitors get hytrain's figures; wall_clock_breakdown has the optimizer's line."""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from support.engines import built, device, make_config
from support.models import loss_of, make_batch, make_model

pytestmark = pytest.mark.timeout(120)
MONITORED = {
    "gpu_fraction", "overlap_ratio", "update_ms", "exposed_update_ms", "step_ms", "grad_norm",
    "clip_coefficient", "skipped",
}  # fmt: skip
"""Copies are timed on a GPU only; predictions come where k is solved, once steps were measured."""


def _train(engine: Any, steps: int, poisoned: int | None = None) -> None:
    for number in range(steps):
        loss = loss_of(engine(**make_batch("mlp", number, device())))
        engine.backward(loss * float("nan") if number == poisoned else loss)
        engine.step()


def _rows(folder: Path, name: str) -> list[tuple[int, float]]:
    (path,) = folder.rglob(f"Train_hytrain_{name}.csv")
    with path.open(newline="") as file:
        return [(int(row[0]), float(row[1])) for row in list(csv.reader(file))[1:]]


def test_csv_has_each_step(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = make_config(gpu_fraction=0.5, accumulation=2, csv_monitor=monitor)
    with built(make_model("mlp"), config) as engine:
        fractions = []
        for number in range(3):
            _train(engine, 2, poisoned=1 if number == 1 else None)
            fractions.append(engine.step_statistics().gpu_fraction)
        for name in MONITORED:
            assert [samples for samples, _ in _rows(tmp_path, name)] == [2, 4, 6], name
        assert [value for _, value in _rows(tmp_path, "skipped")] == [0.0, 1.0, 0.0]
        assert [value for _, value in _rows(tmp_path, "gpu_fraction")] == fractions
        last = engine.step_statistics()
        assert _rows(tmp_path, "update_ms")[-1][1] == pytest.approx(1e3 * last.update_seconds)
        assert _rows(tmp_path, "overlap_ratio")[-1][1] == last.hidden_share
        assert (tmp_path / "job" / "Train_Samples_lr.csv").exists(), "DeepSpeed's own, too"


def test_the_prediction_where_k_is_solved(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = make_config(csv_monitor=monitor)
    config["hytrain"]["gpu_fraction"] = "solve"
    with built(make_model("mlp"), config) as engine:
        _train(engine, 12)
    found = _rows(tmp_path, "predicted_step_ms")
    assert found
    assert all(value > 0 for _, value in found)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="in the environment of `make test-ecosystem`")
    events_of = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    with built(make_model("mlp"), make_config(tensorboard=monitor)) as engine:
        _train(engine, 3)
        engine.monitor.tb_monitor.summary_writer.flush()
    events = events_of.EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    tags = {tag.removeprefix("Train/hytrain/") for tag in events.Tags()["scalars"]}
    assert tags >= MONITORED
    assert [event.step for event in events.Scalars("Train/hytrain/step_ms")] == [1, 2, 3]


def test_wall_clock_breakdown(capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(gpu_fraction=0.5, wall_clock_breakdown=True)
    with built(make_model("mlp"), config) as engine:
        _train(engine, 3)
        last = engine.step_statistics()
    lines = capsys.readouterr().out.splitlines()
    times = [re.findall(r"\| (\w+): ([\d.]+)", line) for line in lines if "optimizer_" in line]
    assert [[name for name, _ in each] for each in times] == 3 * [
        ["optimizer_allgather", "optimizer_gradients", "optimizer_step"]
    ]
    assert float(times[-1][2][1]) == pytest.approx(1e3 * last.update_seconds, abs=0.006)
    assert sum("bwd_microstep" in line for line in lines) == 3, "DeepSpeed's own lines, too"


def test_nothing_is_written_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    with built(make_model("mlp"), make_config()) as engine:
        _train(engine, 2)
        assert not engine.monitor.enabled
    assert "optimizer_" not in capsys.readouterr().out
