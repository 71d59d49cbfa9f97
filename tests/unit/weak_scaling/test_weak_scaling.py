"""Which jobs are run in which order, the claim, and the real path at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.common import records
from experiments.common.records import Json
from experiments.weak_scaling import report, run
from experiments.weak_scaling.stages import launches, stages_of
from experiments.weak_scaling.worker import job_of

pytestmark = pytest.mark.experiment

SETTINGS = {
    "model": "toy",
    "batch": 2,
    "seq": 16,
    "gpu_fraction": "solve",
    "settle": 20,
    "warmup": 3,
    "steps": 4,
}


def test_hytrain_is_measured_at_every_size_before_the_others() -> None:
    found = launches(["hytrain", "zero2", "zero3"], [4, 1], [1])
    assert [(size, systems) for size, systems, _ in found] == [
        (4, ["hytrain"]),
        (1, ["hytrain"]),
        (4, ["zero2", "zero3"]),
        (1, ["zero2", "zero3"]),
    ]
    assert launches(["zero3"], [2], [1])[0][1] == ["zero3"]
    with pytest.raises(ValueError, match="zero4"):
        launches(["zero4"], [2], [1])


def test_only_a_solved_k_needs_settling() -> None:
    stages = stages_of(["hytrain", "zero2"], [1, 4], SETTINGS)
    assert [stage["name"] for stage in stages] == ["hytrain", "zero2", "hytrain x4", "zero2 x4"]
    solved, other = job_of(stages[0], "cpu"), job_of(stages[3], "cpu")
    assert solved.measurement.warmup == 20
    assert other.measurement.warmup == 3
    assert other.entry.options["accumulation"] == 4
    assert other.entry.system == "deepspeed_zero2_offload"


def launch(gpus: int, **steps: float) -> Json:
    results = {
        name: {
            "status": records.OK,
            "ranks": [
                {"step_seconds": step, "samples": 8, "tflops": 1.0, "gpu": {}, "gpu_fraction": None}
            ]
            * gpus,
        }
        for name, step in steps.items()
    }
    return {"gpus": gpus, "results": results}


def test_efficiency_is_that_of_the_slowest_rank() -> None:
    four = launch(4, hytrain=0.4, zero2=1.5)
    ranks = four["results"]["hytrain"]["ranks"]
    four["results"]["hytrain"]["ranks"] = [*ranks[1:], {**ranks[0], "step_seconds": 0.42}]
    runs = [{"launches": [four]}, {"launches": [launch(1, hytrain=0.39), launch(2, hytrain=0.45)]}]
    found = report.measured(runs)
    assert report.efficiency(found, "hytrain", 4) == pytest.approx(0.39 / 0.42)
    checks = {check.claim: check for check in report.check_all(found)}
    assert checks["hytrain: weak scaling to 4 GPUs"].verdict == "reached"
    assert checks["hytrain: weak scaling to 2 GPUs"].verdict == "missed"
    beside = checks["zero2 on 4 GPUs: its time over hytrain's"]
    assert beside.value == pytest.approx(1.5 / 0.42)
    assert beside.verdict == "reported"


def test_without_one_gpu_nothing_is_claimed() -> None:
    (check,) = report.check_all(report.measured([{"launches": [launch(4, hytrain=0.4)]}]))
    assert check.verdict == "not measured"


def test_what_failed_is_in_the_table() -> None:
    failed = {"status": records.OUT_OF_MEMORY, "ranks": [{"error": "no memory left\nat all"}, None]}
    runs = [{"launches": [{"gpus": 2, "results": {"zero3": failed}}]}]
    assert "zero3 on 2: out of memory: no memory left" in report.text_of(runs)


def test_one_rank_and_two(tmp_path: Path) -> None:
    arguments = ["--gpus", "2", "--sizes", "2,1", "--systems", "hytrain", "--out", str(tmp_path)]
    arguments += ["--device", "cpu", "--model", "toy", "--seq", "16", "--batch", "2"]
    options = run.parse([*arguments, "--settle", "2", "--steps", "1", "--budget-seconds", "120"])
    planned = launches(["hytrain"], options.sizes, [2])
    options.accumulation = (2,)
    result = run.measure(options, planned, "a command")
    assert records.read_json(tmp_path / "result.json") == json.loads(json.dumps(result))
    found = report.measured([result])
    assert set(found) == {("hytrain x2", 1), ("hytrain x2", 2)}, result["launches"]
    # Both ranks compute 2 micro-batches of 2 samples.
    ranks = result["launches"][0]["results"]["hytrain x2"]["ranks"]
    assert [rank["samples"] for rank in ranks] == [4, 4]
    assert report.efficiency(found, "hytrain x2", 2) is not None


def test_more_gpus_than_there_are_are_refused() -> None:
    assert run.main(["--gpus", "2", "--out", "unused"]) == 2
