"""The engine of torch alone: it trains what hytrain trains, and is refused what it has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import metrics
import pytest
from support.scripts import run_script

SCRIPT = Path(__file__).resolve().parents[3] / "experiments" / "train_lm" / "train.py"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory, shared_text_files: list[Path]) -> list[str]:
    """Five steps of two micro-batches."""
    cache = tmp_path_factory.mktemp("cache")
    small = "--model llama-3m --seq-len 32 --micro-batch 1 --global-batch 2 --eval-sequences 2"
    data = ["--data", *map(str, shared_text_files), "--cache-dir", str(cache)]
    return [*small.split(), *data, "--steps", "5", "--warmup", "1"]


def _run(out: Path, arguments: list[str], *more: str) -> list[dict[str, Any]]:
    result = run_script(SCRIPT, "--out", str(out), *arguments, *more)
    assert result.returncode == 0, result.stderr
    return metrics.read_metrics(out / "metrics.jsonl")


def test_it_trains_as_hytrain_does(tmp_path: Path, arguments: list[str]) -> None:
    more = ("--eval-every", "2", "--attention", "eager")
    ours = _run(tmp_path / "hytrain", arguments, *more)
    torchs = _run(tmp_path / "torch", arguments, *more, "--engine", "torch")
    for key in ("loss", "lr", "grad_norm", "eval_loss"):
        found, expected = ([r[key] for r in run if key in r] for run in (torchs, ours))
        assert len(found) == (4 if key == "eval_loss" else 5)
        assert found == pytest.approx(expected, rel=1e-4), key
    assert [r["step"] for r in torchs if "eval_loss" in r] == [0, 2, 4, 5]


def test_what_it_has_not_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    for more, words in (
        (("--save-every", "2"), "neither saves nor resumes"),
        (("--gpu-fraction", "0.5"), "leave it out with --engine torch"),
    ):
        argv = ["--out", str(tmp_path), *arguments, "--engine", "torch", *more]
        result = run_script(SCRIPT, *argv)
        assert result.returncode == 2
        assert words in result.stderr
