"""The experiments' own tools: windows of steps, jobs and their ends, curves."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.common import records, runner, systems
from experiments.common.records import Json
from experiments.common.sizes import SIZES, size_of
from experiments.common.timing import Stepper, measure, warm_up
from experiments.common.worker import HostMemoryGuard, Recorder
from experiments.convergence import report
from experiments.convergence.cases import (
    HYTRAIN,
    ZERO2,
    ZERO2_EAGER,
    Case,
    all_cases,
)
from experiments.convergence.curves import (
    WINDOW,
    largest_difference,
    last_common_step,
    smoothed,
)

# -- windows of steps, the systems' configurations, and sizes of models ------------------------

JOB: Json = {"system": "hytrain", "model": "toy", "batch": 2, "seq": 16, "device": "cpu"}


class Settling:
    """A system whose numbers of a step settle when it is drained."""

    thread_candidates = ()

    def __init__(self) -> None:
        self.steps = 0
        self.batches: list[int] = []
        self.is_drained = False

    def step(self, batches: Any) -> torch.Tensor:
        self.steps += 1
        self.batches.append(len(batches))
        return torch.tensor(float(self.steps))

    def observe(self) -> Json:
        return {"step": self.steps, "update_seconds": 1.0 if self.is_drained else 0.5}

    def drain(self) -> None:
        self.is_drained = True


def test_windows_have_their_own_steps_and_the_last_observation_of_each() -> None:
    system = Settling()
    stepper = Stepper(system, [{}, {}], "cpu", accumulation=3)
    warm_up(stepper, 2)
    found = measure(stepper, windows=2, steps=2)
    assert system.batches == [3] * 6
    assert len(found["window_seconds"]) == 2
    assert [row["step"] for row in found["observations"]] == [3, 4, 5, 6]
    assert found["observations"][-1]["update_seconds"] == 1.0, "settled after the drain"
    assert found["losses"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_what_a_job_says_is_in_its_configuration() -> None:
    plain = systems.ds_config({**JOB, "clip": 1.0, "gpu_fraction": 0.5})
    assert plain["hytrain"] == {"gpu_fraction": 0.5}
    assert plain["gradient_clipping"] == 1.0
    assert "check_grad_overflow" not in plain["bf16"]
    options = {"direct": True, "streamed": True, "section": {"moments": "8bit"}}
    direct = systems.ds_config({**JOB, "clip": None, **options})
    assert (direct["gradient_clipping"], direct["bf16"]["check_grad_overflow"]) == (0.0, False)
    assert direct["zero_optimization"]["stage"] == 3
    assert direct["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert direct["hytrain"] == {"gpu_fraction": "solve", "moments": "8bit"}
    theirs = systems.ds_config({**JOB, "system": "deepspeed_zero2_offload"})
    assert "hytrain" not in theirs
    theirs["zero_optimization"]["stage"] = 1  # an engine writes into what it is given
    assert systems.ZERO["deepspeed_zero2_offload"]["stage"] == 2
    with pytest.raises(ValueError, match="'adam' is unknown"):
        systems.build({**JOB, "system": "adam"}, lambda _: None)


@pytest.mark.parametrize("name", [name for name in SIZES if name.endswith("B")])
def test_a_model_has_as_many_parameters_as_its_name_says(name: str) -> None:
    digits = len(name.removesuffix("B").partition(".")[2])
    assert f"{size_of(name).num_parameters / 1e9:.{digits}f}B" == name


# -- jobs that end well, fail, hang or run out of memory ---------------------------------------


def job(label: str, *ends: str, **more: object) -> Json:
    worker = "tests.support.experiment_worker"
    return {"label": label, "worker": worker, "device": "cpu", "ends": list(ends),
            "ranks": len(ends), **more}  # fmt: skip


@pytest.mark.parametrize(
    ("ends", "status", "words"),
    [
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


# -- the convergence experiment ----------------------------------------------------------------


def test_smoothed_differences() -> None:
    noise = np.random.default_rng(0).normal(size=500)
    one, other = 3.0 + noise, 3.0 + noise + 0.25 * (np.arange(500) >= 300)
    assert smoothed(one)[7] == pytest.approx(one[7 : 7 + WINDOW].mean())
    largest, mean = largest_difference(one.tolist(), other.tolist())
    assert largest == pytest.approx(0.25)
    assert mean == pytest.approx(0.25 * (101 + 49.5) / 401, rel=0.02)
    with pytest.raises(ValueError, match="fewer than the 100"):
        largest_difference(one.tolist(), [1.0] * 99)
    assert last_common_step([{"0": 1.0, "500": 1.0, "1000": 1.0}, {"0": 1.0, "500": 1.0}]) == 500


def _training(case: Case, offset: float, steps: int = 400) -> dict[str, Any]:
    losses = [4.0 - 0.005 * step + offset for step in range(steps)]
    held_out = {str(step): 4.0 - 0.005 * step + offset for step in range(0, steps + 1, 100)}
    about = {"kind": case.kind, "seed": case.seed, "status": "ok" if steps == 400 else "stopped"}
    return {**about, "losses": losses, "held_out": held_out, "k": None}


def test_the_tables_of_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = {ZERO2: 0.0, ZERO2_EAGER: 0.005, HYTRAIN: 0.001}
    trainings = [
        _training(case, offsets.get(case.kind, 0.002) + 0.1 * case.seed,
                  300 if case.kind == ZERO2 else 400)
        for case in all_cases()
    ]  # fmt: skip
    result = {"hardware": {"gpu": None}, "options": {"model": "m"}, "trainings": trainings}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert f"| {ZERO2} / {ZERO2_EAGER} | 1 | 300 | 0.0050 | 0.0050 |" in text
    assert f"| {HYTRAIN} / {ZERO2} | 0 | 300 | 0.0010 | 0.0010 |" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {HYTRAIN}, 8bit"))
    assert row.endswith("| 0.2000 | +0.0010 | 0.0010 |")
    assert f"{ZERO2}, seed 0: stopped after 300" in text
    assert (tmp_path / "convergence.png").stat().st_size > 10_000
