"""What an engine says of a step: its state, and reports."""

from __future__ import annotations

import csv
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import built, device, make_config
from support.models import loss_of, make_batch, make_model
from torch.profiler import ProfilerActivity, profile

from hytrain.engine.metrics_file import DecisionLog
from hytrain.errors import AbortedBackwardError
from hytrain.optimizer.step_state import StepPhase, StepState

# -- the phases between two steps --------------------------------------------------------------


def test_a_step_of_two_micro_batches() -> None:
    step = StepState()
    for reduces in (False, True):
        step.begin_backward(reduces=reduces)
        assert step.in_backward
        assert step.is_open
        step.end_backward()
        assert not step.in_backward
        assert step.is_open
        step.complete()
        assert step.has_gradients
        assert step.backward.reduces is reduces
    step.end()
    assert step.phase is StepPhase.IDLE
    assert not step.backward.reduces
    assert not step.has_gradients


def test_a_backward_begins_when_the_one_before_is_complete() -> None:
    step = StepState()
    step.begin_backward(reduces=True)
    for _ in range(2):
        with pytest.raises(AssertionError, match="BACKWARD after"):
            step.begin_backward(reduces=True)
        step.end_backward()


@pytest.mark.parametrize("gradients", [False, True])
def test_what_was_there_before_a_backward_for_inputs_is_there_after_it(gradients: bool) -> None:
    step = StepState()
    if gradients:
        step.begin_backward(reduces=True)
        step.end_backward()
    before = step.phase
    step.begin_inputs()
    assert not step.is_open
    assert step.has_gradients is gradients
    step.end_inputs()
    assert step.phase is before


def test_what_was_dropped_or_aborted_is_over_with_the_next_backward() -> None:
    step = StepState()
    step.drop()
    assert not step.has_gradients
    step.begin_backward(reduces=False)
    step.abort()
    with pytest.raises(AbortedBackwardError, match="last micro-batch did not finish"):
        step.refuse_aborted()
    assert not step.skip_dropped()
    step.begin_batch()
    step.refuse_aborted()
    step.drop()
    assert step.skip_dropped()
    assert not step.skip_dropped()


def test_a_backward_is_of_the_mode_in_which_it_begins() -> None:
    step = StepState()
    with pytest.raises(ValueError, match="x"), step.layer_by_layer():
        step.begin_backward(reduces=True, micro_batches=int("x"))
    assert not step.layer_major
    with step.layer_by_layer():
        step.begin_backward(reduces=True, micro_batches=3)
    assert step.backward.layer_major
    step.end()
    step.begin_backward(reduces=True)
    assert not step.backward.layer_major
    assert step.backward.micro_batches == 1


def test_nothing_follows_the_end() -> None:
    step = StepState()
    step.begin_backward(reduces=True)
    step.close()
    step.end()
    step.abort()
    assert step.is_closed


def test_torchs_profiler_sees_the_phases() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            engine.backward(loss_of(engine(**make_batch("mlp", 0))))
            engine.step()
        torch.testing.assert_close(engine.optimizer.steps, [1])
        layers = [layer.name for layer in engine.optimizer.layer_states]
    seen = {event.key for event in profiled.key_averages()}
    assert {"hytrain::begin_backward", "hytrain::end_backward", "hytrain::step"} <= seen
    assert {f"hytrain::reduce {name}" for name in layers} <= seen


# -- DeepSpeed's monitors get hytrain's figures ------------------------------------------------

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


def test_a_decision_is_written_when_it_is_made_and_when_its_step_is_measured() -> None:
    def made(step: int) -> Any:
        one = SimpleNamespace(measured_seconds=None)
        one.metrics_record = lambda: {"step": step, "measured": one.measured_seconds}
        return one

    decisions = [made(0)]
    log = DecisionLog(lambda since: decisions[since:])
    assert [r["step"] for r in log.take()] == [0]
    assert log.take() == []
    decisions[0].measured_seconds = 2.0
    decisions.append(made(4))
    assert log.take() == [{"step": 0, "measured": 2.0}, {"step": 4, "measured": None}]
    resumed = DecisionLog(lambda since: decisions[since:])
    resumed.skip_history()
    assert [r["step"] for r in resumed.take()] == [4]
