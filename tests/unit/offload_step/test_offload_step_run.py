"""The real path through measuring processes, on the CPU at toy size."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import pytest

from experiments.common import records
from experiments.common.processes import run_process
from experiments.common.records import Entry, Json
from experiments.offload_step import run

ARGUMENTS = [
    *["--part", "B", "--device", "cpu", "--model", "toy", "--batch", "2", "--seq", "16"],
    *["--windows", "2", "--steps", "2", "--warmup", "1"],
]


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The two systems that need torch alone, and one that breaks in its process."""
    out = tmp_path_factory.mktemp("out")
    options = run.parse([*ARGUMENTS, "--out", str(out)])
    entries = [
        Entry(label="forward_backward", system="forward_backward"),
        Entry(label="broken", system="fsdp2", options={"reshard_after_forward": "no bool"}),
        Entry(label="all_gpu", system="all_gpu", clip=1.0),
    ]
    returned = run.run_part(options, entries)
    written = records.read_json(out / "part_B.json")
    # As a file has it: tuples are lists there.
    assert written == json.loads(json.dumps(returned))
    return written


def test_the_measured_systems(part: Json) -> None:
    for record in (part["records"][0], part["records"][2]):
        assert record["status"] == records.OK, record["log"]
        result = record["result"]
        timing = result["timing"]
        assert len(timing["window_seconds"]) == 2
        assert len(timing["host_step_seconds"]) == 4
        assert len(timing["losses"]) == 5
        assert all(math.isfinite(loss) for loss in timing["losses"])
        assert result["step_seconds"] > 0
        assert result["tflops"] > 0
        assert result["worker_busy_share"] is None
        assert result["host"]["steps_rss_bytes"] > 0
        assert result["close_seconds"] is not None


def test_systems_start_from_the_same_weights_and_data(part: Json) -> None:
    losses = [part["records"][i]["result"]["timing"]["losses"] for i in (0, 2)]
    assert losses[0][0] == losses[1][0]
    # The fifth step sees the first batch again, and only one of the systems has learnt.
    assert losses[0][4] == losses[0][0]
    assert losses[1][4] < losses[1][0]


def test_gradient_norms_of_all_steps_are_kept(part: Json) -> None:
    assert len(part["records"][2]["result"]["summary"]["grad_norms"]) == 5


def test_a_failure_is_recorded_and_the_part_goes_on(part: Json) -> None:
    record = part["records"][1]
    assert record["status"] == records.FAILED
    assert record["result"] is None
    assert record["exit_status"] == 1
    assert any("reshard_after_forward" in line for line in record["log"])


def test_an_unknown_part_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main(["--part", "parity", "--out", str(tmp_path)])
    assert "invalid choice: 'parity'" in capsys.readouterr().err


def test_a_hung_process_ends_at_its_limit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    assert run_process(command, dict(os.environ), log, limit=5.0) is None
    assert "begun" in log.read_text()
