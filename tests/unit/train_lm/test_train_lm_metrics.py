"""The metrics file, the curve and the closing table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import metrics
import pytest

from hytrain.engine.metrics_file import DecisionLog


def _record(step: int, **changes: Any) -> dict[str, Any]:
    values = {"step": step, "loss": 5.0 / step, "step_s": 0.5, "tokens_per_s": 2048.0}
    return {**values, "tflops": 0.25, "host_memory_gib": 1.0, **changes}


def _decision(step: int, reason: str = "because; 1 of 4 layers", **changes: Any) -> dict[str, Any]:
    placement = {"step": step, "reason": reason, "costs": {"layers": []}, "measured_seconds": None}
    return {"step": step, "placement": {**placement, **changes}}


def _write(path: Path, *records: dict[str, Any], keep_steps: int = 0) -> list[dict[str, Any]]:
    with metrics.MetricsFile(path, keep_steps=keep_steps) as file:
        file.write(records)
    return metrics.read_metrics(path)


def test_lines_are_json_without_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    limits = {"gpu": [math.inf]}
    records = _write(
        path, _record(1, loss=math.nan, k=None, skipped=False), _decision(1, limits=limits)
    )
    json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert records[0]["loss"] is None
    assert records[0]["skipped"] is False
    assert "k" not in records[0]
    assert records[1]["placement"]["limits"] == {"gpu": [None]}, "JSON has no infinity"
    assert metrics.summarize(records)["loss_start"] is None


def test_resuming_drops_the_lines_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # A decision after step 2 is made in the backward of step 3, which is trained again.
    lines = [_decision(0), _decision(1), *map(_record, (1, 2)), _decision(2), _record(3)]
    _write(path, {"step": 0, "eval_loss": 6.0}, *lines)
    with path.open("a") as half:
        half.write('{"step": 4, "lo')  # the job was killed here
    records = _write(path, _record(3, loss=9.0), keep_steps=2)
    assert [r["step"] for r in records if "placement" in r] == [0, 1]
    assert [r["step"] for r in records if "placement" not in r] == [0, 1, 2, 3]
    assert records[-1]["loss"] == 9.0


def test_a_decision_is_taken_when_it_is_made_and_when_its_step_is_measured() -> None:
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


def test_reason_is_of_the_last_decision_of_rank_0() -> None:
    first = _decision(0, "before the first step", costs=None)
    assert metrics.summarize([first])["k_reason"] is None, "nothing was solved"
    other = {**_decision(9, "another rank's"), "rank": 1}
    records = [first, _decision(4, "old; a"), _decision(8, "new; b"), other]
    assert metrics.summarize(records)["k_reason"] == "new"


def test_summary_leaves_the_first_steps_out() -> None:
    records: list[dict[str, Any]] = [{"step": 0, "eval_loss": 6.0}]
    for step in range(1, 11):
        slow = step <= 3
        times = {"step_s": 9.0 if slow else 0.5, "exposed_s": 9.0 if slow else 0.1}
        # The counter of energy is renewed every other step.
        more = {"loss": 10.0 - step, "update_s": 0.4, "k": 0.5, "gpu_energy_j": 400.0 * (step % 2)}
        records.append(_record(step, **times, **more))
    records.append({"step": 10, "eval_loss": 1.0})
    summary = metrics.summarize(records)
    assert (summary["loss_start"], summary["loss_end"]) == (9.0, 0.5)
    assert (summary["eval_loss_start"], summary["eval_loss_end"]) == (6.0, 1.0)
    assert summary["step_s"] == 0.5
    assert summary["hidden_share"] == pytest.approx(0.75)
    assert summary["gpu_energy_j"] == pytest.approx(1200 / 7)
    assert summary["tokens_per_j"] == pytest.approx(1024 / (1200 / 7))
    table = metrics.format_table(summary)
    assert "75.0%" in table
    assert "GPU energy a step, all ranks" in table
    assert "processors" not in table


def test_without_steps_there_is_nothing_to_show(tmp_path: Path) -> None:
    assert metrics.format_table(metrics.summarize([])) == ""
    path = tmp_path / "metrics.jsonl"
    _write(path, {"step": 0, "eval_loss": 6.0}, _record(1), _record(2, loss=math.nan))
    metrics.plot_loss(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
