"""A config of ds_configs/ under the launcher, on two ranks; `make test-configs` runs all."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import metrics
import pytest
from support.processes import fresh_environment

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIG = REPOSITORY / "ds_configs" / "zero2_unequal_shards.json"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(180)
def test_unequal_shards_on_two_ranks(tmp_path: Path, text_files: list[Path]) -> None:
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    script = str(REPOSITORY / "experiments" / "train_lm" / "train.py")
    small = "--model llama-3m --seq-len 32 --micro-batch 1 --steps 4 --warmup 1 --eval-sequences 2"
    data = ["--data", *map(str, text_files), "--cache-dir", str(tmp_path / "cache")]
    out = tmp_path / "out"
    result = subprocess.run(
        [
            *[*launcher, "--master_port", str(_free_port()), script, *small.split(), *data],
            *["--deepspeed_config", str(CONFIG), "--out", str(out)],
        ],
        env=fresh_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
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
