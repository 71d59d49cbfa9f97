"""A config of ds_configs/ under the launcher, on two ranks; `make test-configs` runs all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import metrics
import models
import pytest
import torch
from support.plans import a_plan, write_a_plan
from support.ports import free_port
from support.processes import fresh_environment

from hytrain.model.discovery import find_layers

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIG = REPOSITORY / "ds_configs" / "zero2_unequal_shards.json"


def _launch(folder: Path, text_files: list[Path], *arguments: str) -> str:
    """Trains on two ranks; results go to ``folder``/out.

    Returns:
        What it printed.
    """
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    script = str(REPOSITORY / "experiments" / "train_lm" / "train.py")
    small = "--model llama-3m --seq-len 32 --warmup 1 --eval-sequences 2"
    data = ["--data", *map(str, text_files), "--cache-dir", str(folder / "cache")]
    result = subprocess.run(
        [
            *[*launcher, "--master_port", str(free_port()), script, *small.split(), *data],
            *["--out", str(folder / "out"), *arguments],
        ],
        env=fresh_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.timeout(299)
def test_unequal_shards_on_two_ranks(tmp_path: Path, text_files: list[Path]) -> None:
    arguments = ("--steps", "4", "--micro-batch", "1", "--deepspeed_config", str(CONFIG))
    _launch(tmp_path, text_files, *arguments)
    out = tmp_path / "out"
    records = metrics.read_metrics(out / "metrics.jsonl")
    steps = [r for r in records if "step_s" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert all(r["k"] == 0.0 for r in steps)
    decisions = {r.get("rank", 0): r["placement"] for r in records if "placement" in r}
    assert sorted(decisions) == [0, 1], "the other rank's are written at the end"
    sizes = [sum(b["parameters"] for b in decisions[r]["layer_bytes"]) for r in (0, 1)]
    assert sizes[0] / sum(sizes) == pytest.approx(0.7, abs=0.01), "each has its own"
    used = json.loads((out / "ds_config.json").read_text(encoding="utf-8"))
    assert used["hytrain"]["shard_fractions"] == [0.7, 0.3]


@pytest.mark.timeout(299)
def test_a_plan_on_two_ranks(tmp_path: Path, text_files: list[Path]) -> None:
    model = models.build_model(
        models.model_config("llama-3m", seq_len=32, min_vocab=256, vocab_size=None),
        device=torch.device("meta"),
        dtype=torch.float32,
        seed=0,
        activation_checkpointing=False,
    )
    plan = a_plan(model, (3, 1), (2, 1), fractions=(0.25, 0.75), num_layers=_num_layers(model))
    path = write_a_plan(tmp_path, plan)
    config = str(REPOSITORY / "ds_configs" / "fp32_cpu.json")
    printed = _launch(
        tmp_path, text_files, "--steps", "14", "--plan", path, "--deepspeed_config", config
    )
    assert "4 sequences: ranks with 3 by 2, 1 by 1" in printed
    assert "plan, predicted -> measured" in printed
    records = metrics.read_metrics(tmp_path / "out" / "metrics.jsonl")
    steps = [r for r in records if "step_s" in r]
    assert [r["step"] for r in steps] == list(range(1, 15))
    assert steps[-1]["loss"] < steps[0]["loss"]
    (report,) = [r["plan"] for r in records if "plan" in r]
    assert report["predicted_seconds"] == 0.25
    assert [rank["batch_size"] for rank in report["ranks"]] == [3, 1]


def _num_layers(model: torch.nn.Module) -> int:
    found = find_layers(model, model.parameters())
    return sum(layer.block is not None for layer in found)
