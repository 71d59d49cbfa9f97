"""The script itself, as a process, on hytrain's engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import metrics
import pytest
import train
from options import OptionError
from support.processes import fresh_environment
from support.scripts import run_script

import hytrain.tools.cli
from hytrain.errors import ConfigError, EngineClosedError, MemoryBudgetError, PlanError

SCRIPT = Path(__file__).resolve().parents[3] / "experiments" / "train_lm" / "train.py"


def _run(out: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return run_script(SCRIPT, "--out", str(out), *argv)


def _run_afresh(out: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *argv],
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _values(out: Path) -> list[dict[str, Any]]:
    timed = {"step_s", "tokens_per_s", "tflops", "host_memory_gib"}
    timed |= {"update_s", "exposed_s", "hidden_share"}
    records = metrics.read_metrics(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in timed} for r in records if "placement" not in r]


def _explained(out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    status = hytrain.tools.cli.main(["explain", str(out / "metrics.jsonl")])
    output = capsys.readouterr()
    assert status == 0, output.err
    return output.out


def test_user_error_is_one_line(tmp_path: Path) -> None:
    result = _run_afresh(tmp_path, "--steps", "0")
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1] == "train.py: --steps is 0; 1 is the least"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("kind", [OptionError, ConfigError, PlanError, MemoryBudgetError])
def test_what_the_user_can_mend_is_one_line(
    kind: type[ValueError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(argv: Sequence[str] | None) -> None:
        raise kind("too little memory")

    monkeypatch.setattr(train, "run", refuse)
    assert train.main([]) == 2
    assert capsys.readouterr().err == "train.py: too little memory\n"


@pytest.mark.parametrize("error", [ValueError("ours"), EngineClosedError("not the user's")])
def test_other_errors_keep_their_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(argv: Sequence[str] | None) -> None:
        raise error

    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(type(error)):
        train.main([])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, shared_text_files: list[Path]) -> list[str]:
    """A run of six tiny steps, half of the layers updated apart from the CPU worker."""
    cache = tmp_path_factory.mktemp("cache")
    small = "--model llama-3m --seq-len 32 --micro-batch 1 --global-batch 2 --eval-sequences 2"
    data = ["--data", *map(str, shared_text_files), "--cache-dir", str(cache)]
    return [*small.split(), *data, "--steps", "6", "--gpu-fraction", "0.5"]


@dataclass(frozen=True)
class Trained:
    """A run with a checkpoint half-way."""

    out: Path
    printed: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> Trained:
    out = tmp_path_factory.mktemp("trained")
    result = _run(out, *arguments, "--save-every", "3")
    assert result.returncode == 0, result.stderr
    return Trained(out, result.stdout)


def test_train(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert "share of update time hidden" in trained.printed
    assert (trained.out / "loss.png").exists()
    steps = [r for r in metrics.read_metrics(trained.out / "metrics.jsonl") if "step_s" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert all(r["k"] == pytest.approx(0.5, abs=0.1) for r in steps)
    assert all(0.0 <= r["hidden_share"] <= 1.0 for r in steps)
    assert all(r["grad_norm"] > 0.0 for r in steps)
    assert ": gpu_fraction is 0.5." in _explained(trained.out, capsys)


def test_solved_run_can_be_explained(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    solved = ["--gpu-fraction", "solve", "--steps", "16", "--save-every", "8"]
    result = _run(tmp_path, *arguments, *solved)
    assert result.returncode == 0, result.stderr
    assert f"why that k: hytrain explain {tmp_path / 'metrics.jsonl'}" in result.stdout
    decisions = [r for r in metrics.read_metrics(tmp_path / "metrics.jsonl") if "placement" in r]
    assert decisions[0]["step"] == 0
    assert all("rank" not in r for r in decisions)
    assert any(r["placement"]["measured_seconds"] is not None for r in decisions)
    assert "Candidates" in _explained(tmp_path, capsys)
    result = _run(tmp_path, *arguments, *solved, "--resume", "step8")
    assert result.returncode == 0, result.stderr
    steps = [r["step"] for r in metrics.read_metrics(tmp_path / "metrics.jsonl") if "step_s" in r]
    assert steps == list(range(1, 17))
    assert "Candidates" in _explained(tmp_path, capsys)


def test_plain_deepspeed_records_no_decisions(tmp_path: Path, arguments: list[str]) -> None:
    config = json.loads((SCRIPT.parents[2] / "ds_configs" / "fp32_cpu.json").read_text())
    del config["hytrain"]
    config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's would be compiled first
    path = tmp_path / "plain.json"
    path.write_text(json.dumps(config))
    plain = [a for a in arguments if a not in ("--gpu-fraction", "0.5")]
    result = _run(tmp_path, *plain, "--engine", "deepspeed", "--deepspeed_config", str(path))
    assert result.returncode == 0, result.stderr
    assert "hytrain explain" not in result.stdout
    assert not any("placement" in r for r in metrics.read_metrics(tmp_path / "metrics.jsonl"))


def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, arguments: list[str], trained: Trained
) -> None:
    first, second = trained.out, tmp_path
    shutil.copytree(first / "checkpoints", second / "checkpoints")
    shutil.copy(first / "metrics.jsonl", second / "metrics.jsonl")
    result = _run(second, *arguments, "--resume", "step3")
    assert result.returncode == 0, result.stderr
    assert _values(second) == _values(first)
