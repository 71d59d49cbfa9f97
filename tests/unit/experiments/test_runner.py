"""Jobs that end well, fail, hang or run out of memory; groups; the guard of the host's memory."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.common import records, runner
from experiments.common.records import Json
from experiments.common.worker import HostMemoryGuard, Recorder


def job(label: str, *ends: str, **more: object) -> Json:
    worker = "tests.support.experiment_worker"
    return {"label": label, "worker": worker, "device": "cpu", "ends": list(ends),
            "ranks": len(ends), **more}  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "status", "words"),
    [
        (("ends", "ends"), records.OK, ""),
        (("fails", "hangs"), records.FAILED, "RuntimeError: rank 0"),
        (("hangs", "dies"), records.OUT_OF_MEMORY, "out of memory"),
        (("refuses",), records.REFUSED, "ConfigError: change a key"),
        (("hangs",), records.TIMED_OUT, ""),
    ],
)
def test_a_job_has_the_status_of_the_rank_that_says_why(
    ends: tuple[str, ...], status: str, words: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runner, "GRACE_SECONDS", 0.5)
    limit = 3.0 if ends == ("hangs",) else 50.0
    found = runner.run_job(job("one", *ends), tmp_path, limit)
    assert found["status"] == status
    assert words in "\n".join(found["log"])
    assert all(rank["world"] == str(len(ends)) for rank in found["ranks"])
    cores = [set(rank["cores"]) for rank in found["ranks"]]
    if len(os.sched_getaffinity(0)) >= len(cores) > 1:
        assert not set.intersection(*cores)


def _options(out: Path, budget: float = 100.0) -> argparse.Namespace:
    return runner.parser("").parse_args(
        ["--out", str(out), "--device", "cpu", "--budget-seconds", str(budget)]
    )


def _statuses(
    monkeypatch: pytest.MonkeyPatch, out: Path, *jobs: Json, budget: float = 100.0
) -> Any:
    """What becomes of jobs whose processes end as their labels say."""

    def run_job(one: Json, *_: object, **__: object) -> Json:
        return {"label": one["label"], "status": one["label"].split()[-1], "ranks": [], "log": []}

    monkeypatch.setattr(runner, "run_job", run_job)
    monkeypatch.setattr(runner, "end_on_sigterm", lambda: None)
    result = runner.measure(_options(out, budget), jobs)
    assert records.read_json(out / "result.json")["jobs"] == result["jobs"]
    return [(record["label"], record["status"]) for record in result["jobs"]]


def test_groups_end_with_what_was_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until_ok = {"group": "a", "group_ends": "ok"}
    until_failed = {"group": "b", "group_ends": "failed"}
    jobs = [
        *({"label": f"a{n} {how}", **until_ok} for n, how in enumerate(("failed", "ok", "ok"))),
        *({"label": f"b{n} {how}", **until_failed} for n, how in enumerate(("ok", "failed", "ok"))),
        {"label": "c ok"},
    ]
    found = _statuses(monkeypatch, tmp_path, *jobs)
    assert [label for label, _ in found] == ["a0 failed", "a1 ok", "b0 ok", "b1 failed", "c ok"]


def test_a_process_ends_before_the_hosts_memory_is_used_up(tmp_path: Path) -> None:
    left: list[int] = []
    readings = iter([100, 90, 80, 20])
    recorder = Recorder(tmp_path / "rank0.json", time.time() + 10.0)
    guard = HostMemoryGuard(
        recorder, 50, available=lambda: next(readings, 20), leave=left.append,
        interval_seconds=0.001,
    )  # fmt: skip
    with guard:
        end = time.monotonic() + 10.0
        while not left and time.monotonic() < end:
            time.sleep(0.001)
    assert left == [3]
    found = records.read_json(tmp_path / "rank0.json")
    assert found["status"] == records.HOST_MEMORY_LOW
    assert found["host_available_least_bytes"] == 20
