"""The result as it grows, and the guard of the host's memory."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from experiments.common import records
from experiments.solve_k.launch import outcome
from experiments.solve_k.recorder import (
    HOST_MEMORY_LOW,
    LOW_MEMORY_EXIT,
    METRICS,
    RUNNING,
    HostMemoryGuard,
    Recorder,
)


def test_the_file_always_holds_what_has_been_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    recorder = Recorder(path)
    recorder.put(reference={"step_seconds": 1.0})
    recorder.append("points", {"gpu_layers": 0})
    recorder.append("points", {"gpu_layers": 2})
    recorder.host("swept", {"rss_bytes": 2**30})
    found = records.read_json(path)
    assert found["status"] == RUNNING
    assert [point["gpu_layers"] for point in found["points"]] == [0, 2]
    assert found["host"]["swept"]["rss_bytes"] == 2**30


def test_the_metrics_are_json_lines_beside_the_result(tmp_path: Path) -> None:
    Recorder(tmp_path / "result.json").metrics([{"step": 1}, {"step": 2}])
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_the_guard_saves_the_result_and_leaves(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    recorder = Recorder(path)
    recorder.put(reference={"step_seconds": 1.0})
    amounts = iter([100, 50, 9])
    left = threading.Event()
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    guard = HostMemoryGuard(
        recorder, 10, available=lambda: next(amounts), leave=leave, interval_seconds=0.001
    )
    guard.start()
    assert left.wait(60)
    guard.stop()
    assert codes == [LOW_MEMORY_EXIT]
    assert guard.least_bytes == 9
    found = records.read_json(path)
    assert found["status"] == HOST_MEMORY_LOW
    assert found["reference"] == {"step_seconds": 1.0}


def test_the_guard_lets_a_process_with_memory_run(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "result.json")
    guard = HostMemoryGuard(recorder, 10, available=lambda: 11, interval_seconds=0.001)
    guard.start()
    guard.stop()
    assert guard.least_bytes == 11
    assert not (tmp_path / "result.json").exists()


def test_how_a_process_ended() -> None:
    running = {"status": RUNNING}
    assert outcome(0, {"status": records.OK}, []) == records.OK
    assert outcome(3, {"status": HOST_MEMORY_LOW}, []) == HOST_MEMORY_LOW
    assert outcome(None, running, []) == records.TIMED_OUT
    assert outcome(-9, running, []) == records.OUT_OF_MEMORY
    assert outcome(1, None, ["Traceback"]) == records.FAILED
