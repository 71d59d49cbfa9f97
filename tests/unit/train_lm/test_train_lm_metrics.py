"""The metrics file, the curve and the closing table."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metrics
import pytest
import torch
from energy import energy_fields


@dataclass(frozen=True)
class Statistics:
    step: int = 1
    gpu_fraction: float = 0.5
    update_seconds: float = 0.2
    exposed_seconds: float = 0.05
    hidden_share: float = 0.75
    grad_norm: float | None = 1.5
    clip_coefficient: float | None = 1.0
    skipped: bool = False


def _record(step: int, **changes: Any) -> metrics.StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "step_s": 0.5,
        "tokens_per_s": 2048.0,
        "tflops": 0.25,
        "host_memory_gib": 1.0,
        "gpu_memory_gib": None,
    }
    return metrics.StepRecord(**{**values, **changes})


def test_lines_are_json_and_none_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as file:
        file.evaluation(0, 6.0)
        file.step(_record(1, **metrics.update_fields(Statistics())))
        file.step(_record(2, **metrics.update_fields(None)))
    evaluation, with_updates, without = metrics.read_metrics(path)
    assert evaluation == {"step": 0, "eval_loss": 6.0}
    assert with_updates["k"] == 0.5
    assert with_updates["hidden_share"] == 0.75
    assert with_updates["skipped"] is False
    assert not {"k", "hidden_share", "update_s", "gpu_memory_gib"} & without.keys()


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as file:
        file.step(_record(1, loss=math.nan, grad_norm=math.inf))
    line = path.read_text()
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["loss"] is None
    assert record["grad_norm"] is None
    assert metrics.summarize([record]).loss_start is None


def test_resuming_drops_the_lines_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as file:
        file.evaluation(0, 6.0)
        for step in (1, 2, 3):
            file.step(_record(step))
    with path.open("a") as half:
        half.write('{"step": 4, "lo')  # the job was killed here
    with metrics.MetricsFile(path, keep_steps=2) as file:
        file.step(_record(3, loss=9.0))
    records = metrics.read_metrics(path)
    assert [r["step"] for r in records] == [0, 1, 2, 3]
    assert records[-1]["loss"] == 9.0


def _decision(step: int, reason: str = "because; 1 of 4 layers", **changes: Any) -> dict[str, Any]:
    placement = {"step": step, "reason": reason, "costs": {"layers": []}, "measured_seconds": None}
    return {"step": step, "placement": {**placement, **changes}}


def test_decisions_are_lines_and_leave_the_rest_alone(tmp_path: Path) -> None:
    with_decisions, without = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (with_decisions, without):
        with metrics.MetricsFile(path) as file:
            file.evaluation(0, 6.0)
            for step in (1, 2, 3, 4, 5):
                file.step(_record(step, k=0.5, update_s=0.1, exposed_s=0.0))
                if path is with_decisions:
                    file.decisions([_decision(step, limits={"gpu": [math.inf]})])
    records = metrics.read_metrics(with_decisions)
    assert records[2]["placement"]["limits"] == {"gpu": [None]}, "JSON has no infinity"
    plain = metrics.summarize(metrics.read_metrics(without))
    assert plain.k_reason is None
    summary = metrics.summarize(records)
    assert summary == dataclasses.replace(plain, k_reason="because")
    assert "why that k" in metrics.format_table(summary)
    metrics.plot_loss(with_decisions, tmp_path / "loss.png")


def test_reason_is_of_the_last_decision_of_rank_0() -> None:
    first = _decision(0, "before the first step", costs=None)
    assert metrics.summarize([first]).k_reason is None, "nothing was solved"
    other = {**_decision(9, "another rank's"), "rank": 1}
    records = [first, _decision(4, "old; a"), _decision(8, "new; b"), other]
    assert metrics.summarize(records).k_reason == "new"
    resumed = [*records, _decision(10, "before the first step", costs=None)]
    assert metrics.summarize(resumed).k_reason is None, "the old reason is not the resumed run's"


def test_resuming_drops_the_decisions_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as file:
        file.decisions([_decision(0), _decision(1)])
        file.step(_record(1))
        file.step(_record(2))
        # Made in the backward of step 3, from which the resumed run knows nothing.
        file.decisions([_decision(2)])
        file.step(_record(3))
    with metrics.MetricsFile(path, keep_steps=2):
        pass
    kept = metrics.read_metrics(path)
    assert [r["step"] for r in kept if "placement" in r] == [0, 1]
    assert [r["step"] for r in kept if "step_s" in r] == [1, 2]


def test_curve_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with metrics.MetricsFile(path) as file:
        file.evaluation(0, 6.0)
        for step in (1, 2, 3):
            file.step(_record(step, loss=math.nan if step == 2 else 1.0))
    metrics.plot_loss(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_summary_leaves_the_first_steps_out() -> None:
    records: list[dict[str, Any]] = [{"step": 0, "eval_loss": 6.0}]
    for step in range(1, 11):
        slow = step <= 3
        records.append(
            {
                "step": step,
                "loss": 10.0 - step,
                "step_s": 9.0 if slow else 0.5,
                "tokens_per_s": 1.0 if slow else 100.0,
                "tflops": 2.0,
                "host_memory_gib": 1.0,
                "k": 0.5,
                "update_s": 0.4,
                "exposed_s": 9.0 if slow else 0.1,
            }
        )
    records.append({"step": 10, "eval_loss": 1.0})
    summary = metrics.summarize(records)
    assert (summary.loss_start, summary.loss_end) == (9.0, 0.5)
    assert (summary.eval_loss_start, summary.eval_loss_end) == (6.0, 1.0)
    assert (summary.step_s, summary.tokens_per_s) == (0.5, 100.0)
    assert summary.hidden_share == pytest.approx(0.75)


def test_table_shows_what_there_is() -> None:
    plain = {
        "step": 1,
        "loss": 2.0,
        "step_s": 1.0,
        "tokens_per_s": 10.0,
        "tflops": 1.0,
        "host_memory_gib": 1.0,
    }
    table = metrics.format_table(metrics.summarize([plain]))
    assert "training loss, first step" in table
    assert "hidden" not in table
    hidden = {**plain, "k": 0.0, "update_s": 1.0, "exposed_s": 0.25}
    table = metrics.format_table(metrics.summarize([hidden]))
    assert "75.0%" in table


def test_no_steps_at_all() -> None:
    assert metrics.format_table(metrics.summarize([])) == ""


def test_bar_fields() -> None:
    assert metrics.bar_fields(_record(1)) == {"loss": "5.000", "tok/s": "2,048", "TFLOP/s": "0.25"}
    assert metrics.bar_fields(_record(1, k=0.7))["k"] == "0.70"


def test_host_memory_is_this_process() -> None:
    assert 0.01 < metrics.host_memory_gib() < 1000


def test_energy_is_of_all_that_is_known() -> None:
    both = energy_fields(torch.tensor([30.0, 10.0], dtype=torch.float64), tokens=1000.0)
    assert both == {"gpu_energy_j": 30.0, "cpu_energy_j": 10.0, "tokens_per_j": 25.0}
    one = energy_fields(torch.tensor([math.nan, 10.0], dtype=torch.float64), tokens=1000.0)
    assert one == {"gpu_energy_j": None, "cpu_energy_j": 10.0, "tokens_per_j": 100.0}
    none = energy_fields(torch.tensor([math.nan, math.nan], dtype=torch.float64), tokens=1000.0)
    assert set(none.values()) == {None}
    # A rank whose GPU cannot be read leaves the sum of all ranks' unknown.
    assert math.isnan(float(torch.tensor(math.nan) + 30.0))


def test_the_table_has_means_of_energy() -> None:
    # The counter is renewed every other step.
    steps = [
        {k: v for k, v in dataclasses.asdict(record).items() if v is not None}
        for record in (_record(step, gpu_energy_j=400.0 * (step % 2)) for step in range(1, 12))
    ]
    summary = metrics.summarize(steps)
    assert summary.gpu_energy_j == 200.0
    assert summary.cpu_energy_j is None
    assert summary.tokens_per_j == pytest.approx(1024 / 200)
    table = metrics.format_table(summary)
    assert "GPU energy a step, all ranks" in table
    assert "processors" not in table
