"""The commands of experiments/moment_kinds at toy size, and what their tables say of failures."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from experiments.common import records
from experiments.common.records import Job, Json
from experiments.common.systems.hytrain import config_of
from experiments.moment_kinds import run, sharded

THEIRS = f"kind {run.ZERO3}"
TOY = ["--device", "cpu", "--model", "toy", "--seq", "32", "--batch", "2"]


@pytest.mark.parametrize("text", ["8bit", "4bit=3", "8bit=", "8bit=two"])
def test_a_model_is_a_kind_and_a_number_of_blocks(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="fp32, bf16, 8bit"):
        sharded._model(text)


def test_every_rank_of_a_sharded_model_makes_the_same_steps() -> None:
    options = sharded.parse(["--models", "8bit=50", "bf16=44", "--out", "unused"])
    stages = sharded.stages_of(options)
    assert [stage["name"] for stage in stages] == ["8bit 50", "bf16 44"]
    settings = stages[1]["job"]["entry"]["options"]
    assert settings["stage"] == 3
    assert settings["layers"] == 44
    assert settings["kinds"] == ["bf16"]
    assert not settings["direct"]
    assert stages[1]["job"]["entry"]["clip"] == 1.0


def test_without_clipping_updates_are_final_at_once() -> None:
    options = sharded.parse(["--clip", "0", "--out", "unused"])
    (stage,) = sharded.stages_of(options)
    job = Job.from_json(stage["job"])
    config = config_of(job)
    assert config["gradient_clipping"] == 0.0
    assert config["bf16"]["check_grad_overflow"] is False


def test_kinds_are_held_against_fp32_turn_by_turn() -> None:
    """In later turns fewer steps are clipped, and all kinds are faster."""

    def window(seconds: float) -> Json:
        return {
            "step_seconds": seconds,
            "gpu": {},
            "gpu_layers": 0,
            "num_layers": 26,
            "tflops": 1.0,
            "host_rss_bytes": 0,
            "clipped_share": None,
        }

    result: Json = {
        "num_parameters": 3e9,
        "kind fp32": [window(seconds) for seconds in (0.8, 0.7, 0.6)],
        "kind bf16": [window(seconds) for seconds in (0.4, 0.7, 0.5)],
    }
    process = {"label": "k0", "status": records.OK, "result": result}
    *_, bf16 = run.table([process])
    assert bf16.split(" | ")[6] == "1.20"


def test_the_slowest_ranks_step_is_the_jobs() -> None:
    rank: Json = {
        "step_seconds": 2.0,
        "num_parameters": 41e9,
        "gpu_layers": 20,
        "num_layers": 52,
        "tflops": 400.0,
        "gpu": {},
        "host_rss_bytes": 100 * 2**30,
        "first_loss": 10.5,
        "loss": 9.25,
    }
    results: Json = {
        "8bit 50": {"status": records.OK, "ranks": [rank, {**rank, "step_seconds": 2.5}]},
        "fp32 50": {"status": records.OUT_OF_MEMORY, "ranks": [{"error": "no room"}, None]},
        "bf16 50": {"status": records.TIMED_OUT, "ranks": [], "log": ["one", "last line"]},
    }
    _, _, good, failed, late = sharded.table(results, tokens=8192)
    cells = [cell.strip() for cell in good.strip("|").split("|")]
    assert cells[1:6] == ["41.00 B", "20/52, 20/52", "2.500", "6554", "320"]
    assert cells[-2:] == ["200.0", "10.50 to 9.25"]
    assert failed == "fp32 50: out of memory: no room"
    assert late == "bf16 50: timed out: last line"


@pytest.mark.experiment
def test_two_ranks_train_a_sharded_model(tmp_path: Path) -> None:
    arguments = ["--models", "8bit=3", "bf16=2", "--out", str(tmp_path), *TOY]
    options = sharded.parse([*arguments, "--settle-steps", "2", "--budget-seconds", "150"])
    results = sharded.measure(options)["results"]
    assert {name: found["status"] for name, found in results.items()} == {
        "8bit 3": records.OK,
        "bf16 2": records.OK,
    }
    for name, layers in (("8bit 3", 5), ("bf16 2", 4)):  # with the embedding and the head
        ranks = results[name]["ranks"]
        assert [rank["num_layers"] for rank in ranks] == [layers, layers]
        assert ranks[0]["loss"] < ranks[0]["first_loss"]


@pytest.mark.experiment
def test_zero3_offload_runs_beside(tmp_path: Path) -> None:
    """Within the same limits, by the same batches."""
    arguments = ["--part", "beside", "--kinds", "fp32", "--out", str(tmp_path), *TOY]
    processes = run.run(run.parse(arguments))["processes"]
    assert [process["status"] for process in processes] == [records.OK, records.OK]
    ours, theirs = (process["result"] for process in processes)
    assert ours["limits"] == theirs["limits"] == {"host_gib": 64.0}
    first, second = (found[kind][0] for found, kind in ((ours, "kind fp32"), (theirs, THEIRS)))
    assert first["step_seconds"] > 0.0
    assert second["step_seconds"] > 0.0
    *_, last = run.table(processes)
    assert run.ZERO3 in last


@pytest.mark.experiment
@pytest.mark.parametrize(
    ("part", "kinds"), [("k0", ["fp32", "bf16", "8bit"]), ("workstation", ["8bit"])]
)
def test_a_part_measures_its_kinds(tmp_path: Path, part: str, kinds: list[str]) -> None:
    options = run.parse(["--part", part, "--out", str(tmp_path), *TOY, "--budget-seconds", "200"])
    (process,) = run.run(options)["processes"]
    assert process["status"] == records.OK, process["log"]
    result = process["result"]
    assert [kind for kind in run.KINDS if f"kind {kind}" in result] == kinds
    assert len(run.table([process])) == 2 + len(kinds)
    if part == "workstation":
        assert result["limits"] == {"host_gib": 64.0}
