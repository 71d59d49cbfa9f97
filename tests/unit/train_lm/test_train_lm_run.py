"""The script itself, as a process, on hytrain's engine."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import metrics
import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "experiments" / "train_lm" / "train.py"
SMALL = "--model llama-3m --seq-len 32 --micro-batch 1 --global-batch 2 --eval-sequences 2"


def _run(out: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *argv],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _values(out: Path) -> list[dict[str, Any]]:
    timed = {"step_s", "tokens_per_s", "tflops", "host_memory_gib"}
    timed |= {"update_s", "exposed_s", "hidden_share"}
    records = metrics.read_metrics(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in timed} for r in records]


def test_user_error_is_one_line(tmp_path: Path) -> None:
    result = _run(tmp_path, "--steps", "0")
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1] == "train.py: --steps is 0; 1 is the least"
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(
    not hasattr(importlib.import_module("hytrain"), "initialize"), reason="no engine built yet"
)
def test_train_save_and_resume(tmp_path: Path, text_files: list[Path]) -> None:
    data = [*SMALL.split(), "--data", *map(str, text_files), "--cache-dir", str(tmp_path / "c")]
    run = [*data, "--steps", "6", "--gpu-fraction", "0.5"]
    first, second = tmp_path / "first", tmp_path / "second"
    result = _run(first, *run, "--save-every", "3")
    assert result.returncode == 0, result.stderr
    assert "share of update time hidden" in result.stdout
    assert (first / "loss.png").exists()
    records = metrics.read_metrics(first / "metrics.jsonl")
    steps = [r for r in records if "step_s" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert all(r["k"] == pytest.approx(0.5, abs=0.2) for r in steps)
    assert all(0.0 <= r["hidden_share"] <= 1.0 for r in steps)

    shutil.copytree(first / "checkpoints", second / "checkpoints")
    shutil.copy(first / "metrics.jsonl", second / "metrics.jsonl")
    result = _run(second, *run, "--resume", "step3")
    assert result.returncode == 0, result.stderr
    assert _values(second) == _values(first)
