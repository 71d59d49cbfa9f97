"""The training script (experiments/train_lm), as a process on each of its engines, and its data."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from support.plans import a_plan, write_a_plan
from support.ports import free_port
from support.scripts import run_script

import hytrain.tools.cli
from hytrain.errors import EngineClosedError, PlanError
from hytrain.model.discovery import find_layers

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "experiments" / "train_lm" / "train.py"
# The script's modules stand beside it, as the launcher finds them.
sys.path.insert(0, str(SCRIPT.parent))

import corpus  # noqa: E402
import data  # noqa: E402
import ds_config  # noqa: E402
import metrics  # noqa: E402
import models  # noqa: E402
import train  # noqa: E402
from options import OptionError, build_parser, parse_options  # noqa: E402


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of six tiny steps of two micro-batches."""
    folder = tmp_path_factory.mktemp("text")
    for name, repeats in (("a.txt", 300), ("b.py", 200)):
        lines = [f"{name} line {i} of {repeats}" for i in range(repeats)]
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    small = "--model llama-3m --seq-len 32 --warmup 1 --eval-sequences 2 --steps 6"
    cache = tmp_path_factory.mktemp("cache")
    return [*small.split(), "--data", str(folder), "--cache-dir", str(cache)]


BATCH = ("--micro-batch", "1", "--global-batch", "2")


def _run(out: Path, *argv: str, **variables: str) -> str:
    """What it printed."""
    result = run_script(SCRIPT, "--out", str(out), *argv, **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _records(out: Path) -> list[dict[str, Any]]:
    return metrics.read_metrics(out / "metrics.jsonl")


def _explained(out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    status = hytrain.tools.cli.main(["explain", str(out / "metrics.jsonl")])
    output = capsys.readouterr()
    assert status == 0, output.err
    return output.out


# -- the process -------------------------------------------------------------------------------


def test_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    argv = [*arguments, *BATCH, "--gpu-fraction", "0.5"]
    assert "share of update time hidden" in _run(first, *argv, "--save-every", "3")
    assert (first / "loss.png").exists()
    steps = [r for r in _records(first) if "step_s" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert all(r["k"] == pytest.approx(0.5, abs=0.1) for r in steps)
    assert ": gpu_fraction is 0.5." in _explained(first, capsys)
    second.mkdir()
    shutil.copytree(first / "checkpoints", second / "checkpoints")
    shutil.copy(first / "metrics.jsonl", second / "metrics.jsonl")
    _run(second, *argv, "--resume", "step3")
    timed = {"step_s", "tokens_per_s", "tflops", "host_memory_gib"}
    timed |= {"update_s", "exposed_s", "hidden_share"}
    values = [
        [{k: v for k, v in r.items() if k not in timed} for r in found if "placement" not in r]
        for found in (_records(first), _records(second))
    ]
    assert values[0] == values[1]


def test_solved_run_can_be_explained(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = _run(tmp_path, *arguments, *BATCH, "--gpu-fraction", "solve", "--steps", "16")
    assert f"why that k: hytrain explain {tmp_path / 'metrics.jsonl'}" in printed
    decisions = [r for r in _records(tmp_path) if "placement" in r]
    assert decisions[0]["step"] == 0
    assert any(r["placement"]["measured_seconds"] is not None for r in decisions)
    assert "Candidates" in _explained(tmp_path, capsys)


@pytest.mark.experiment
def test_engines_train_the_same(tmp_path: Path, arguments: list[str]) -> None:
    config = json.loads((ROOT / "ds_configs" / "fp32_cpu.json").read_text())
    del config["hytrain"]
    config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's would be compiled first
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps(config))
    common = [*arguments, *BATCH, "--eval-every", "2", "--attention", "eager"]
    runs = {}
    for engine, more in (
        ("hytrain", ()),
        ("torch", ("--engine", "torch")),
        ("deepspeed", ("--engine", "deepspeed", "--deepspeed_config", str(plain))),
    ):
        _run(tmp_path / engine, *common, *more)
        runs[engine] = _records(tmp_path / engine)
        assert any("placement" in r for r in runs[engine]) is (engine == "hytrain")
    for engine in ("torch", "deepspeed"):
        for key in ("loss", "lr", "grad_norm", "eval_loss"):
            found, expected = ([r[key] for r in runs[e] if key in r] for e in (engine, "hytrain"))
            assert found, key
            assert found == pytest.approx(expected, rel=1e-4), (engine, key)


@pytest.mark.timeout(299)
def test_a_plan_on_two_ranks(tmp_path: Path, arguments: list[str]) -> None:
    model = models.build_model(
        models.model_config("llama-3m", seq_len=32, min_vocab=256, vocab_size=None),
        device=torch.device("meta"),
        dtype=torch.float32,
        seed=0,
        activation_checkpointing=False,
    )
    num_layers = sum(layer.block is not None for layer in find_layers(model, model.parameters()))
    plan = a_plan(model, (3, 1), (2, 1), fractions=(0.25, 0.75), num_layers=num_layers)
    options = [*arguments, "--steps", "14", "--plan", write_a_plan(tmp_path, plan)]
    options += ["--deepspeed_config", str(ROOT / "ds_configs" / "fp32_cpu.json")]
    port = str(free_port())

    def of_rank(rank: int) -> str:
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        return _run(tmp_path / "out", *options, **places, **job, MASTER_PORT=port)

    with ThreadPoolExecutor(2) as threads:
        printed, _ = threads.map(of_rank, range(2))
    assert "4 sequences: ranks with 3 by 2, 1 by 1" in printed
    assert "plan, predicted -> measured" in printed
    records = _records(tmp_path / "out")
    steps = [r for r in records if "step_s" in r]
    assert [r["step"] for r in steps] == list(range(1, 15))
    assert steps[-1]["loss"] < steps[0]["loss"]
    (report,) = [r["plan"] for r in records if "plan" in r]
    assert report["predicted_seconds"] == 0.25
    assert [rank["batch_size"] for rank in report["ranks"]] == [3, 1]
    decisions = {r.get("rank", 0): r["placement"] for r in records if "placement" in r}
    assert sorted(decisions) == [0, 1], "the other rank's are written at the end"
    sizes = [sum(b["parameters"] for b in decisions[r]["layer_bytes"]) for r in (0, 1)]
    assert sizes[0] / sum(sizes) == pytest.approx(0.25, abs=0.01), "each has its own"


@pytest.mark.parametrize(
    "error", [OptionError("x"), PlanError("x"), ValueError("ours"), EngineClosedError("not his")]
)
def test_what_the_user_can_mend_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: Sequence[str] | None) -> None:
        raise error

    monkeypatch.setattr(train, "run", fail)
    if str(error) == "x":
        assert train.main([]) == 2
        assert capsys.readouterr().err == "train.py: x\n"
    else:
        with pytest.raises(type(error)):
            train.main([])


# -- options -----------------------------------------------------------------------------------


def _parse(*argv: str) -> argparse.Namespace:
    parser = deepspeed.add_config_arguments(build_parser())
    return parse_options(parser, argv, on_gpu=False)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps", "0"], "--steps is 0; 1 is the least"),
        (["--lr", "nan"], "--lr is nan"),
        (["--gpu-fraction", "1.5"], r"\[0, 1\]"),
        (["--gpu-fraction", "solve", "--engine", "deepspeed"], "--engine deepspeed"),
        (["--gpu-fraction", "0.5", "--engine", "torch"], "leave it out with --engine torch"),
        (["--save-every", "2", "--engine", "torch"], "neither saves nor resumes"),
        (["--plan", "plan.json", "--engine", "deepspeed"], "--plan is hytrain's"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--warmup", "10", "--steps", "10"], "--warmup 10"),
    ],
)
def test_unusable_options(argv: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        _parse(*argv)


@pytest.mark.parametrize(
    ("argv", "config", "world_size", "expected"),
    [
        ([], {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}, 2, (8, 4)),
        ([], {"train_batch_size": 32}, 4, (8, 1)),
        (["--micro-batch", "2"], {"train_batch_size": 32}, 4, (2, 4)),
        (["--global-batch", "64"], {"train_micro_batch_size_per_gpu": 8}, 2, (8, 4)),
    ],
)
def test_batches(
    argv: list[str], config: dict[str, Any], world_size: int, expected: tuple[int, int]
) -> None:
    plan = ds_config.plan_batches(config, _parse(*argv), world_size)
    assert (plan.micro_batch, plan.accumulation) == expected


def test_a_json_that_contradicts_the_plan_is_refused() -> None:
    plan = data.BatchPlan(
        micro_batch=1, accumulation=1, world_size=2, sizes=(3, 1), micro_sizes=(2, 1)
    )
    config = {"train_micro_batch_size_per_gpu": 8, "hytrain": {"plan": "plan.json"}}
    with pytest.raises(OptionError, match="train_micro_batch_size_per_gpu is 8 in the DeepSpeed"):
        ds_config.apply_options(config, _parse(), plan, Path("plan.json"))


# -- data --------------------------------------------------------------------------------------

SEQ_LEN = 8


def _sequences(seed: int = 0) -> data.PackedSequences:
    # Token t of the corpus is t itself, so a row tells which sequence it is.
    tokens = np.arange(100 * SEQ_LEN + 3, dtype=np.uint32)
    return data.PackedSequences(corpus.Corpus(tokens, "d"), seq_len=SEQ_LEN, seed=seed)


def _numbers(batch: torch.Tensor) -> list[int]:
    starts = batch[:, :1]
    assert torch.equal(batch, starts + torch.arange(batch.shape[1])), "a row is one sequence"
    return (starts.flatten() // SEQ_LEN).tolist()


def test_an_epoch_visits_every_training_sequence_once() -> None:
    sequences = _sequences()
    held_out = _numbers(sequences.held_out_batch(0, 2))
    first, second = (_numbers(sequences.train_batch(i * 98, 98)) for i in range(2))
    assert sorted(first + held_out) == list(range(100))
    assert first != sorted(first) == sorted(second)
    assert first != second


def test_order_is_frozen() -> None:
    """A checkpoint of an older version must find its place: these numbers may never change."""
    assert _numbers(_sequences(seed=5).train_batch(0, 6)) == [11, 31, 54, 97, 42, 99]
    with pytest.raises(data.DataError, match="--seed"):
        _sequences(seed=5).consumed_at(_sequences(seed=4).position(48))


def test_a_bad_line_is_named_and_leaves_no_entry_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"text": "ok"}\n{"Text": "x"}\n')
    with pytest.raises(corpus.DataError, match="line 2"):
        corpus.load_corpus([path], corpus.ByteTokenizer(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
