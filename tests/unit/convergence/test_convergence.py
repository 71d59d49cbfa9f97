"""The convergence experiment: its cases, how curves are held against each other, and its tables."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.convergence import report
from experiments.convergence.cases import (
    ADAMW,
    FIXED_FRACTION,
    HYTRAIN,
    ZERO2,
    ZERO2_EAGER,
    ZERO2_GPU,
    Case,
    all_cases,
    ds_config,
)
from experiments.convergence.curves import (
    WINDOW,
    Curve,
    largest_difference,
    last_common_step,
    read_curve,
    smoothed,
)
from experiments.convergence.run import Runs, Training, as_asked, make_parser, write


def test_a_command_may_say_of_the_schedule_the_cores_and_who_rests() -> None:
    words = ["--hytrain-cores", "8", "--together"]
    cases = [as_asked(case, make_parser().parse_args(words)) for case in all_cases()]
    plain = [as_asked(case, make_parser().parse_args([])) for case in all_cases()]
    assert plain == all_cases()
    assert not any(case.is_first for case in cases)
    for case, before in zip(cases, plain, strict=True):
        assert case.cores == (8 if case.engine == "hytrain" else before.cores)
    sizes = {"micro_batch": 4, "cpu_threads": 1, "on_gpu": True}
    config = ds_config(cases[0], **sizes, schedule_steps=1000, lr=2e-4)
    assert config["optimizer"]["params"]["lr"] == 2e-4
    schedule = config["scheduler"]["params"]
    assert (schedule["total_num_steps"], schedule["warmup_num_steps"]) == (1000, 50)


def test_cases_differ_in_what_is_compared_alone() -> None:
    cases = all_cases()
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        on_gpu, on_cpu = (
            ds_config(case, micro_batch=4, cpu_threads=1, on_gpu=on_gpu) for on_gpu in (True, False)
        )
        assert on_gpu["bf16"]["enabled"] is not on_cpu["bf16"]["enabled"]
        assert ("hytrain" in on_gpu) is (case.engine == "hytrain")
        assert on_gpu["gradient_clipping"] == 1.0
        params = on_gpu["optimizer"]["params"]
        assert (params["lr"], params["betas"]) == (6e-4, [0.9, 0.999])
    sections = [
        ds_config(case, micro_batch=4, cpu_threads=1, on_gpu=True)["hytrain"]
        for case in cases
        if case.engine == "hytrain"
    ]
    found = {(s["moments"], s["moments_seed"], s["gpu_fraction"]) for s in sections}
    for moments in ("fp32", "bf16", "8bit"):
        assert {(moments, 0, "solve"), (moments, 1, "solve"), (moments, 2, FIXED_FRACTION)} <= found


def test_a_curve_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_curve(path).losses == []
    lines: list[Any] = [
        {"step": 0, "eval_loss": 5.0},
        {"step": 1, "loss": 4.000004, "k": 0.5},
        {"step": 0, "placement": {"reason": "none"}},
        {"step": 2, "loss": None, "k": 1.0},
        {"step": 2, "eval_loss": 3.5},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo')
    curve = read_curve(path)
    assert curve.losses[0] == 4.0
    assert np.isnan(curve.losses[1])
    assert (curve.held_out, curve.k) == ({"0": 5.0, "2": 3.5}, 1.0)


def test_smoothed_differences() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(size=500)
    one, other = 3.0 + noise, 3.0 + noise + 0.25 * (np.arange(500) >= 300)
    assert smoothed(one)[7] == pytest.approx(one[7 : 7 + WINDOW].mean())
    largest, mean = largest_difference(one.tolist(), other.tolist())
    assert largest == pytest.approx(0.25)
    assert mean == pytest.approx(0.25 * (101 + 49.5) / 401, rel=0.02)
    assert largest_difference(one.tolist(), other[:300].tolist()) == pytest.approx((0.0, 0.0))
    with pytest.raises(ValueError, match="fewer than the 100"):
        largest_difference(one.tolist(), [1.0] * 99)


def test_the_last_step_that_all_have() -> None:
    assert last_common_step([{"0": 1.0, "500": 1.0, "1000": 1.0}, {"0": 1.0, "500": 1.0}]) == 500
    assert last_common_step([{"0": 1.0}, {"0": 1.0, "500": 1.0}]) is None


def _training(case: Case, offset: float, steps: int = 400) -> dict[str, Any]:
    losses = [4.0 - 0.005 * step + offset for step in range(steps)]
    held_out = {str(step): 4.0 - 0.005 * step + offset for step in range(0, steps + 1, 100)}
    about = {"kind": case.kind, "seed": case.seed, "status": "ok" if steps == 400 else "stopped"}
    return {**about, "losses": losses, "held_out": held_out, "k": None}


def test_the_tables_of_a_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = {ZERO2: 0.0, ZERO2_GPU: 0.003, ZERO2_EAGER: 0.005, HYTRAIN: 0.001, ADAMW: 0.004}
    trainings = [
        _training(case, offsets.get(case.kind, 0.002) + 0.1 * case.seed,
                  300 if case.kind == ZERO2 else 400)
        for case in all_cases()
    ]  # fmt: skip
    result = {
        "hardware": {
            "gpu": None, "cpu": "a CPU", "cores": 2, "date": "2026-01-01", "commit": "abc",
            "python": "3.11", "versions": {"torch": "2.11"},
        },
        "options": {"model": "m", "micro_batch": 4, "seq_len": 256, "steps": 400},
        "trainings": trainings,
    }  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert f"| {ZERO2} / {ZERO2_EAGER} | 1 | 300 | 0.0050 | 0.0050 |" in text
    assert f"| {HYTRAIN} / {ZERO2} | 0 | 300 | 0.0010 | 0.0010 |" in text
    assert "(+0.0010) after 300" in text
    assert "held-out loss after 400 steps" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {HYTRAIN}, 8bit"))
    assert row.endswith("| 0.2000 | +0.0010 | 0.0010 |")
    assert f"{ZERO2}, seed 0: stopped after 300" in text
    assert (tmp_path / "convergence.png").stat().st_size > 10_000


@contextlib.contextmanager
def _running(
    case: Case, folder: Path, steps: int, looks: list[tuple[float, int]]
) -> Generator[Any]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    curve = Curve(losses=[1.0] * looks[-1][1])
    training = Training(case, folder, process, steps, [0], 0.0, curve, looks)
    try:
        yield training
    finally:
        training.stop("stopped")


def _becomes(training: Training, *, halted: bool) -> bool:
    """Whether its process comes to that state; a signal takes a moment."""
    stat = Path(f"/proc/{training.process.pid}/stat")
    deadline = time.monotonic() + 30
    while (stat.read_text().rpartition(")")[2].split()[0] == "T") is not halted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_what_is_wanted_first_has_the_machine_where_it_would_be_late(tmp_path: Path) -> None:
    first, *_, last = all_cases()
    assert first.is_first
    assert not last.is_first
    runs = Runs([], make_parser().parse_args(["--limit-seconds", "100"]), tmp_path)
    now = time.monotonic()
    looks = [(now - 10, 100), (now, 200)]
    with (
        _running(first, tmp_path, 400, looks) as one,
        _running(last, tmp_path, 400, looks) as other,
    ):
        runs.trainings += [one, other]
        for steps, is_late in ((1000, False), (4000, True), (1000, False)):
            one.steps = steps  # three quarters of them, at ten a second, in 80
            runs.let_first_ones_pass(now)
            assert _becomes(other, halted=is_late)
            time.sleep(0.05)  # for a signal that should not have been sent
            assert _becomes(other, halted=is_late)
            assert _becomes(one, halted=False)


def test_trainings_start_as_cores_get_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr(subprocess, "Popen", lambda *_a, **_n: pytest.fail("no process"))
    started: list[list[int]] = []

    def process(_runs: Runs, case: Case, cores: list[int], folder: Path) -> Training:
        started.append(cores)
        return Training(case, folder, None, 4000, cores, 0.0)  # pyright: ignore

    monkeypatch.setattr(Runs, "_process", process)
    cases = all_cases()
    runs = Runs(cases, make_parser().parse_args([]), tmp_path)
    runs.start()
    assert [t.case for t in runs.trainings] == cases[: len(started)]
    taken = [core for cores in started for core in cores]
    assert len(set(taken)) == len(taken) == sum(case.cores for case in cases[: len(started)]) <= 16
    assert sum(case.cores for case in cases[: len(started) + 1]) > 16


def test_a_run_goes_on_with_another_s_trainings(tmp_path: Path) -> None:
    one, two = all_cases()[:2]
    earlier = [_training(one, 0.0), _training(two, 0.0, 300)]
    ended = Training(two, tmp_path, None, 400, [0], 0.0, Curve(losses=[1.0] * 200))  # pyright: ignore
    write(earlier, [ended], tmp_path, {"command": ""})
    found = json.loads((tmp_path / "result.json").read_text())["trainings"]
    assert [len(t["losses"]) for t in found] == [400, 300]
    ended.curve = Curve(losses=[1.0] * 400)
    write(earlier, [ended], tmp_path, {"command": ""})
    found = json.loads((tmp_path / "result.json").read_text())["trainings"]
    assert [len(t["losses"]) for t in found] == [400, 400]
