"""`hytrain explain`: which file is which, what is printed, the picture, errors on one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.placement_runs import NUM_LAYERS, decision, step_line, text_of, typical_run
from support.plans import a_plan

from hytrain.formats.plan_file import PlanFile, write_plan
from hytrain.tools import cli

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
# Per block: 4 * 64^2 attention, 3 * 64 * 128 feed-forward, two norms of 64.
BLOCK = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
PARAMETERS = 3 * BLOCK + 2 * 256 * 64 + 64

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_clipping": 1.0,
    "zero_force_ds_cpu_optimizer": False,
    "hytrain": {},
}

SHARDED = {**CONFIG["zero_optimization"], "stage": 3, "stage3_param_persistence_threshold": 0}


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text_of(typical_run()) + '{"step": 21, "lo')
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG, indent=2))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def _error(capsys: Capture, *arguments: object, lines: int = 1) -> str:
    """What a refused command says: so many lines on stderr, nothing on stdout."""
    assert cli.main(["explain", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == lines
    assert captured.err.startswith("hytrain: ")
    return captured.err


# -- a metrics file ----------------------------------------------------------------------------


def test_a_run_is_explained_as_text_and_as_json(metrics: Path, capsys: Capture) -> None:
    assert cli.main(["explain", str(metrics)]) == 0
    text = capsys.readouterr().out
    assert "13 of 26 layers on the GPU (k = 0.5): " in text
    assert "<- chosen" in text
    assert cli.main(["explain", str(metrics), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["decision"]["gpu_layers_target"] == 13
    assert len(result["candidates"]) == NUM_LAYERS + 1


def test_a_file_of_one_line_is_a_metrics_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text_of([decision(0, 0, 0).metrics_record()]))
    assert cli.main(["explain", str(path)]) == 0
    assert "Measured\n" not in capsys.readouterr().out


def test_ranks(metrics: Path, capsys: Capture) -> None:
    other = {**decision(0, 3, 4).metrics_record(), "rank": 1}
    metrics.write_text(text_of([*typical_run(), other]))
    assert cli.main(["explain", str(metrics), "--rank", "1"]) == 0
    text = capsys.readouterr().out
    assert "Rank 1 of the 2" in text
    assert "4 of 26 layers on the GPU" in text
    text = _error(capsys, metrics, "--rank", 2)
    assert "rank 0, 1" in text
    metrics.with_name("metrics.rank2.jsonl").write_text(metrics.read_text())
    assert f"give {metrics.with_name('metrics.rank2.jsonl')}" in _error(
        capsys, metrics, "--rank", 2
    )


def test_files_that_are_neither(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "file"
    assert "No such file" in _error(capsys, path)
    assert "directory" in _error(capsys, tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "not text" in _error(capsys, path)
    for text, words in (
        ("", "is empty"),
        ('{"schemaVersion": 1, "traceEvents": []}', "is a trace, for `hytrain trace report`"),
        ('{"version": 1, "global_batch": 8}', "is a plan, for training"),
        ("# Title\n\nText.\n", "is not JSON (line 1, column 1: Expecting value)"),
        ('{"hytrain": ', "is not JSON (line 1, column 1"),
        ("[" * 5000, "cannot be read"),
        ("[1, 2]", "is a list"),
        (text_of([step_line(1, 0.5, 0)]), "no placement decision"),
        ('{"loss": 1}\n{"loss": 2}\n', "line 1"),
        ('{"train_batch_size": 8}', 'no section "hytrain"'),
        (
            json.dumps(LLAMA, indent=2),
            "is a model's config, for --model of `hytrain explain`: give",
        ),
        (json.dumps(LLAMA), "is a model's config, for --model of `hytrain explain`: give"),
        ('{"hytrian": {}}', 'rename "hytrian"'),
    ):
        path.write_text(text)
        assert words in _error(capsys, path)


def test_options_of_a_configuration_are_refused(metrics: Path, capsys: Capture) -> None:
    assert "--ranks, --gpu-memory: for a DeepSpeed" in _error(
        capsys, metrics, "--ranks", 2, "--gpu-memory", 100
    )


# -- a configuration ---------------------------------------------------------------------------


def test_a_configuration_alone_gives_words(config: Path, capsys: Capture) -> None:
    assert cli.main(["explain", str(config)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Accepted by training. Memory was not checked: give the model")
    assert "k: solved while training" in text
    assert f"\n  hytrain explain {config} --model " in text
    assert cli.main(["explain", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("k: solved" in line for line in found["words"])
    assert found["verdict"].startswith("Accepted by training")
    assert "--ranks, --gpu-memory: needs --model" in _error(
        capsys, config, "--gpu-memory", 10, "--ranks", 4
    )


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"3"'])
def test_numbers_that_are_none(tmp_path: Path, capsys: Capture, value: str) -> None:
    path = tmp_path / "ds_config.json"
    text = json.dumps(CONFIG | {"gradient_accumulation_steps": "?"}, indent=2).replace('"?"', value)
    path.write_text(text)
    assert '"gradient_accumulation_steps" is ' in _error(capsys, path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": {"type": "Lion"}}, "\"optimizer.type\" is 'Lion'"),
        ({"zero_optimization": {}}, '"zero_optimization.stage" is missing'),
        ({"zero_optimization": {"stag": 2}}, 'is missing (there is "stag")'),
        ({"zero_optimization": {"stage": 0}}, "ZeRO stages 1 to 3; set 2"),
        (
            {"zero_optimization": {"stage": 4}},
            "is 4: hytrain works with ZeRO stages 1 to 3; set 2\n",
        ),
        ({"hytrain": True}, 'write "hytrain": {}\n'),
        ({"zero_optimization": {"stage": 2}}, '"zero_optimization.offload_optimizer.device"'),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "\"zero_optimization.offload_optimizer.device\" is 'nvme'",
        ),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "cpu", "pin_memry": True},
                }
            },
            'did you mean "pin_memory"',
        ),
        ({"bf16": {"enabled": True, "enabld": 1}}, '"bf16.enabld" is no key that DeepSpeed knows'),
        ({"fp16": {"enabled": True}}, "are both true"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "make it a multiple"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism is not supported"),
    ],
)
def test_what_training_refuses_is_refused(
    tmp_path: Path, capsys: Capture, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG | change))
    assert cli.main(["explain", str(path), "--json"]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "0, 1, 2, 3 or 3" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("change", "ranks", "is_kept"),
    [
        ({}, 1, True),
        ({"zero_optimization": SHARDED}, 2, True),
        ({}, 2, False),  # the first backward keeps as much
        # So do layers that are small enough to be whole on each rank.
        ({"zero_optimization": {**CONFIG["zero_optimization"], "stage": 3}}, 2, False),
        ({"hytrain": {"accumulation": "layer_major"}}, 1, False),
    ],
)
def test_gradients_kept_between_micro_batches_are_counted(
    tmp_path: Path, model: Path, capsys: Capture, change: Any, ranks: int, is_kept: bool
) -> None:
    bases: list[int] = []
    for steps in (1, 4):
        path = tmp_path / f"{steps}.json"
        path.write_text(json.dumps(CONFIG | {"gradient_accumulation_steps": steps} | change))
        options = ("--gpu-memory", "80", "--host-memory", "64", "--ranks", str(ranks), "--json")
        assert cli.main(["explain", str(path), "--model", str(model), *options]) == 0
        found = json.loads(capsys.readouterr().out)
        bases.append(found["candidates"][0]["gpu_bytes"])
    assert bases[1] - bases[0] >= 2 * PARAMETERS // ranks * is_kept
    assert (bases[1] > bases[0]) == is_kept


def _pretend_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch report one GPU of 80 GiB with 70 free, and a limit of half for this process."""

    def fraction(device: torch.device) -> float:
        assert device.index is not None, "torch refuses a device without a number"
        return 0.5

    properties = SimpleNamespace(is_integrated=False)
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "mem_get_info": lambda device: (70 << 30, 80 << 30),
        "memory_reserved": lambda device: 0,
        "get_per_process_memory_fraction": fraction,
        "get_device_properties": lambda device: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("gpu", ["pretended", pytest.param("real", marks=pytest.mark.gpu)])
def test_memory_of_this_machine_is_what_its_gpu_has(
    config: Path, model: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, gpu: str
) -> None:
    if gpu == "pretended":
        _pretend_a_gpu(monkeypatch)
    assert cli.main(["explain", str(config), "--model", str(model), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)["verdict"]
    found = re.search(r"of the GPU's ([\d.]+) GiB", verdict)
    assert found is not None, verdict
    if gpu == "pretended":
        assert float(found[1]) == 40
    else:
        assert 0 < float(found[1]) <= torch.cuda.get_device_properties(0).total_memory / 2**30


def test_keys_that_training_ignores_are_said(tmp_path: Path, config: Path, capsys: Capture) -> None:
    path = tmp_path / "misspelt.json"
    optimizer = {"type": "AdamW", "parms": {"lr": 1e-4}}
    path.write_text(json.dumps(CONFIG | {"wall_clock_brakdown": True, "optimizer": optimizer}))
    assert cli.main(["explain", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert '"wall_clock_brakdown" is no key of DeepSpeed' in text
    assert 'did you mean "optimizer.params"' in text
    assert cli.main(["explain", str(config)]) == 0
    assert "Warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        ({"zero_force_ds_cpu_optimizer": True}, True),
        ({"zero_force_ds_cpu_optimizer": True, "optimizer": {"type": "AdamW"}}, False),
        ({}, False),
    ],
)
def test_an_optimizer_that_accelerate_would_make_in_vain_is_told(
    config: Path, capsys: Capture, change: dict[str, Any], is_told: bool
) -> None:
    config.write_text(json.dumps(CONFIG | change))
    assert cli.main(["explain", str(config)]) == 0
    text = capsys.readouterr().out
    assert text.startswith('Warning: "zero_force_ds' if is_told else "Accepted by training")
    if is_told:
        config.write_text(json.dumps({k: v for k, v in CONFIG.items() if "force" not in k}))
        assert cli.main(["explain", str(config)]) == 0
        assert capsys.readouterr().out == text


def test_what_a_trainer_fills_in_is_no_error(capsys: Capture) -> None:
    for path in sorted((ROOT / "ds_configs").rglob("*.json")):
        has_plan = "plan" in json.loads(path.read_text())["hytrain"]  # whose file is the user's
        assert cli.main(["explain", str(path)]) == (2 if has_plan else 0), path
        warnings = capsys.readouterr().out.count("Warning: no batch size: Lightning's strategy")
        assert warnings == path.name.startswith("lightning"), path


def test_a_missing_batch_size_is_an_error_and_all_wrong_keys_are_told(
    config: Path, capsys: Capture
) -> None:
    rest = {key: value for key, value in CONFIG.items() if "batch" not in key}
    config.write_text(json.dumps(rest | {"gradient_accumulation_steps": 2}))
    assert "does not say how large a batch is" in _error(capsys, config)
    config.write_text(json.dumps(rest))
    for more in ((), ("--json",)):
        assert cli.main(["explain", str(config), *more]) == 0
        assert "Accepted by training, once a batch size is set." in capsys.readouterr().out
    config.write_text(json.dumps(rest | {"train_batchsize": 8}))
    text = _error(capsys, config, lines=2)
    assert "does not say how large a batch is" in text
    assert 'did you mean "train_batch_size"' in text
    optimizer = {"type": "AdamW", "params": {"lrr": 1e-4}}
    typos = {"bf16": {"enabld": 1}, "wall_clock_brakdown": True, "optimizer": optimizer}
    config.write_text(json.dumps(CONFIG | typos))
    text = _error(capsys, config, lines=3)
    for key in ("optimizer.params.lrr", "bf16.enabld", "wall_clock_brakdown"):
        assert f'"{key}" is no ' in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('"hytrain": {}, "hytrain": {}', "Duplicate keys"),
        ('"hytrain": {} // as training reads it\n', None),
        ('"hytrain": {"moments": "8bit",}', None),
    ],
)
def test_the_json_is_read_as_training_reads_it(
    config: Path, capsys: Capture, change: str, words: str | None
) -> None:
    config.write_text(config.read_text().replace('"hytrain": {}', change))
    if words is None:
        assert cli.main(["explain", str(config)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert re.match(
            r"Warning: \S+ line 1\d, column \d+: DeepSpeed reads this, Trainer and accelerate do "
            r"not: .+\. Accepted by training\. ",
            text,
        )
    else:
        assert words in _error(capsys, config)


@pytest.fixture
def planned(config: Path) -> PlanFile:
    """Of two ranks, beside a configuration that names it."""
    text = json.loads(config.read_text()) | {"hytrain": {"plan": "plan.json"}}
    config.write_text(json.dumps(text))
    linear = torch.nn.Linear(1, 1)
    plan = a_plan(linear, [10, 6], [5, 3], fractions=[0.75, 0.25], gpu_layers=[3, 2], num_layers=3)
    sizes = {"parameters": 2 * 256 * 64 + 3 * BLOCK + 64, "dtype": "bf16"}
    plan = plan.model_copy(update={"model": plan.model.model_copy(update=sizes)})
    write_plan(config.with_name("plan.json"), plan)
    return plan


def test_a_plan_decides_as_in_training(
    config: Path, model: Path, planned: PlanFile, capsys: Capture
) -> None:
    assert cli.main(["explain", str(config)]) == 0
    assert "Batch: 16 samples a step, 10, 6 on the ranks" in capsys.readouterr().out
    call = ["explain", str(config), "--model", str(model), "--host-memory", "16", "--json"]
    for rank, own in enumerate(planned.ranks):
        assert cli.main([*call, "--gpu-memory", "8", "--rank", str(rank)]) == 0
        decision = json.loads(capsys.readouterr().out)["decision"]
        assert decision["gpu_layers_target"] == own.gpu_layers
        held = decision["layer_bytes"][1]["parameters"]
        assert held == pytest.approx(BLOCK * own.shard_fraction, rel=0.01)
    assert "ranks: planned for 2, found 3" in _error(capsys, *call[1:], "--ranks", 3)
    assert "count from 0" in _error(capsys, *call[1:], "--rank", 2)


def test_a_plan_that_training_refuses_is_refused(
    config: Path, model: Path, planned: PlanFile, capsys: Capture
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4}))
    assert "layers: planned for 3, found 4" in _error(capsys, config, "--model", model)
    text = json.loads(config.read_text())
    for change, words in (
        ({"train_batch_size": 8}, "global batch: planned for 16, found 8"),
        ({"bf16": {"enabled": False}}, "dtype: planned for bf16, found fp32"),
        ({"hytrain": {"plan": "plan.json", "batch_sizes": [8, 8]}}, "leave these out"),
    ):
        changed = config.with_name("changed.json")
        changed.write_text(json.dumps(text | change))
        assert words in _error(capsys, changed)
    plan = config.with_name("plan.json")
    plan.write_text("garbage")
    assert "is not JSON" in _error(capsys, config)
    plan.unlink()
    assert "there is no file" in _error(capsys, config)


def test_a_models_sizes_are_the_real_ones(config: Path, model: Path, capsys: Capture) -> None:
    arguments = ["--model", str(model), "--json", "--gpu-memory", "8", "--host-memory", "16"]
    assert cli.main(["explain", str(config), *arguments]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["parameters"] == 2 * 256 * 64 + 3 * BLOCK + 64
    limits = result["decision"]["limits"]
    assert limits["gpu"] == 8 * 1024**3
    assert limits["gpu_base"] >= 2 * result["parameters"]
    layers = result["decision"]["layer_bytes"]
    assert [layer["parameters"] for layer in layers[1:4]] == [BLOCK] * 3
    assert [row["gpu_layers"] for row in result["candidates"]] == list(range(6))
    assert cli.main(["explain", str(config), *arguments[:2], *arguments[3:]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "in 5 layers (3 blocks, and what comes before and after)" in text
    moves = "training may move up to 5 there, where activations leave room"
    assert text.startswith(f"Fits: starts with k = 0 (0 of 5 layers on the GPU); {moves}: ")
    assert "of the GPU's 8.00 GiB, " in text
    assert "of the host's 16.00 GiB. Model: " in text
    assert "<- first step" in text
    assert "GPU: there is" in text
    assert cli.main(["explain", str(config), *arguments[:2]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Assumed, since not given: --gpu-memory: " in text
    assert ("this machine has no GPU" in text) == (not torch.cuda.is_available())
    assert "GiB a rank, free on this machine now." in text
    if not torch.cuda.is_available():
        unknown = r"Fits if the GPU has more than [\d.]+ \w+ \(--gpu-memory was not given\): "
        assert re.match(unknown, text)


def test_ranks_that_differ_are_told_in_the_first_line(
    config: Path, model: Path, capsys: Capture
) -> None:
    large = {"num_hidden_layers": 40, "hidden_size": 1024, "intermediate_size": 4096}
    (model / "config.json").write_text(json.dumps(LLAMA | large))
    call = ["explain", str(config), "--model", str(model), "--host-memory", "64", "--gpu-memory"]
    for memory, rank, words in (
        ("8,9,10", (), "All 3 ranks fit."),
        ("8,2,1", ("--rank", "0"), "Does not fit: rank 1, 2 of 3 (--rank 1 says why)."),
    ):
        assert cli.main([*call, memory, *rank]) == len(rank) // 2
        text = " ".join(capsys.readouterr().out.split())
        assert text.startswith(f"{words} What follows is of rank 0. Fits: ")
        assert "of the GPU's 8.00 GiB" in text
    own = r"[\d.]+ \w+ of GPU memory missing; try .+?\. What follows is of rank 1\. Model: "
    for memory, which in (("8,2,1", "1, 2 of 3; rank 1"), ("8,2", "1 of 2")):
        assert cli.main([*call, memory]) == 1
        text = " ".join(capsys.readouterr().out.split())
        assert re.match(f"Does not fit: rank {which}: {own}", text), text
        assert f"; rank 1 of {len(memory.split(','))} owns " in text
    assert "--gpu-memory 8,2: give one number, or one a rank: 3" in _error(
        capsys, *call[1:], "8,2", "--ranks", 3
    )
    # The host's part of a large shard is too large, of a small one it is not.
    config.write_text(json.dumps(CONFIG | {"hytrain": {"shard_fractions": [0.9, 0.1]}}))
    call[5] = "14"
    assert cli.main([*call, "4", "--rank", "1"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Does not fit: rank 0 of 2 (--rank 0 says why). What follows is of ")


def test_inputs_of_other_ranks_are_their_own(config: Path, model: Path, capsys: Capture) -> None:
    """With --seq ranks differ by their micro-batches, too."""
    keys = {"batch_sizes": [64, 1], "micro_batch_sizes": [64, 1]}
    given = {key: value for key, value in CONFIG.items() if "batch" not in key}
    config.write_text(json.dumps(given | {"hytrain": keys}))
    # Inputs of 8192 tokens, 64 wide, take 1 MiB a sample and block: 192 MiB of 64 samples.
    call = ["explain", str(config), "--model", str(model), "--gpu-memory", "1.1", "--rank", "1"]
    assert cli.main([*call, "--host-memory", "16", "--seq", "8192"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Does not fit: rank 0 of 2 (--rank 0 says why). What follows is of ")
    assert cli.main([*call, "--host-memory", "16"]) == 0
    assert capsys.readouterr().out.startswith("Fits: ")


def test_ranks_that_no_job_has_are_refused(config: Path, model: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["explain", str(config), "--model", str(model), "--ranks", "300000000"])
    assert left.value.code == 2
    assert "'300000000' is not a number of ranks from 1 to 65536" in capsys.readouterr().err


def test_streamed_weights_of_one_rank_have_two_gradients_at_a_time(
    config: Path, model: Path, capsys: Capture
) -> None:
    """As those of several have: what a rank keeps of weights is on the host."""
    cpu = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    zero |= {"stage3_param_persistence_threshold": 0}
    config.write_text(json.dumps(CONFIG | {"zero_optimization": zero}))
    call = ["explain", str(config), "--model", str(model), "--gpu-memory", "24", "--json"]
    base: list[int] = []
    for ranks in ("1", "2"):
        assert cli.main([*call, "--host-memory", "64", "--ranks", ranks]) == 0
        base.append(json.loads(capsys.readouterr().out)["decision"]["limits"]["gpu_base"])
    assert base[0] == pytest.approx(base[1], rel=1e-2)  # shards of two are padded


@pytest.mark.parametrize(
    ("stage", "keys", "kept"),
    [
        (3, {}, False),
        (3, {"micro_batch_sizes": [4, 1]}, True),  # both gather for the second's three
        (2, {"micro_batch_sizes": [1, 1]}, False),  # all of the first backward's are counted anyway
    ],
)
def test_gradients_kept_between_dealt_micro_batches(
    stage: int, keys: dict[str, Any], kept: bool, config: Path, model: Path, capsys: Capture
) -> None:
    given = {key: value for key, value in CONFIG.items() if "batch" not in key}
    given["zero_optimization"] = SHARDED | {"stage": stage}
    given["hytrain"] = {"batch_sizes": [4, 3], **keys}
    config.write_text(json.dumps(given))
    call = ["explain", str(config), "--model", str(model), "--gpu-memory", "24"]
    assert cli.main([*call, "--host-memory", "64", "--json"]) == 0
    limits = json.loads(capsys.readouterr().out)["decision"]["limits"]
    assert (limits["kept_gradients"] > 0) == kept


@pytest.mark.parametrize(
    ("keys", "samples", "side"),
    [
        ({"accumulation": "layer_major", "micro_batch_sizes": [2, 2]}, 32, "gpu_base"),
        (
            {"accumulation": "layer_major", "micro_batch_sizes": [2, 2], "activations": "offload"},
            32,
            "host_base",
        ),
        ({"micro_batch_sizes": [2, 2]}, 2, "gpu_base"),
        ({}, 32, "gpu_base"),
    ],
)
def test_inputs_that_wait_together(
    keys: dict[str, Any], samples: int, side: str, config: Path, model: Path, capsys: Capture
) -> None:
    """Layer by layer those of all samples of a step, else of a micro-batch."""
    given = {key: value for key, value in CONFIG.items() if "batch" not in key}
    config.write_text(json.dumps(given | {"hytrain": {"batch_sizes": [32, 32], **keys}}))
    call = ["explain", str(config), "--model", str(model), "--gpu-memory", "24"]
    call += ["--host-memory", "64", "--json"]

    def explained(*flags: str) -> tuple[dict[str, Any], int]:
        assert cli.main([*call, *flags]) == 0
        found = json.loads(capsys.readouterr().out)
        return found, found["decision"]["limits"][side]

    _, without = explained()
    found, counted = explained("--seq", "1024")
    # Inputs of 1,024 tokens, 64 wide, in bf16 take 128 KiB a sample and block.
    assert found["block_input_bytes"] == samples * 3 * 2**17
    assert counted - without == found["block_input_bytes"]


def test_dealt_batches_need_a_loop_that_fills_auto_in(config: Path, capsys: Capture) -> None:
    for batch in ("auto", 4):
        given = {"gradient_clipping": batch, "hytrain": {"batch_sizes": [2, 1]}}
        config.write_text(json.dumps({k: v for k, v in CONFIG.items() if "batch" not in k} | given))
        assert cli.main(["explain", str(config)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("need a loop with engine.train_batch" in text) == (batch == "auto")


def test_a_table_of_many_layers_has_the_ends_of_what_fits(
    config: Path, model: Path, capsys: Capture
) -> None:
    large = {"num_hidden_layers": 60, "hidden_size": 2048, "intermediate_size": 8192}
    (model / "config.json").write_text(json.dumps(LLAMA | large))
    call = ["--model", str(model), "--host-memory", "32", "--gpu-memory", "40"]
    assert cli.main(["explain", str(config), *call]) == 0
    text = capsys.readouterr().out
    first, last = re.findall(r"\((\d+) of .*?move\s+up\s+to\s+(\d+)", text, re.S)[0]
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d\.\d\d ", line)]
    assert len(rows) < 20
    fits = {int(row[0]): row[4] for row in rows}
    assert 0 < int(first) < int(last) < 62
    assert fits[0] == fits[int(first) - 1] == fits[int(last) + 1] == fits[62] == "no"
    assert fits[int(first)] == fits[int(last)] == "yes"


def test_little_room_is_told(config: Path, model: Path, capsys: Capture) -> None:
    """Of the one number that fits, and for activations."""
    large = {"num_hidden_layers": 60, "hidden_size": 2048, "intermediate_size": 8192}
    (model / "config.json").write_text(json.dumps(LLAMA | large | {"vocab_size": 200000}))
    call = ["explain", str(config), "--model", str(model), "--host-memory", "128", "--gpu-memory"]
    for gpu, words in (
        (10.3, r" Only 0 GPU layers fit\. Activations come on top: [\d.]+ MiB are left for them\."),
        (20, ""),
    ):
        assert cli.main([*call, str(gpu)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert re.search(rf"of the host's 128\.00 GiB\.{words} Model: ", text), text
        moves = "; training may move up to " in text
        assert moves == (gpu == 20)


def test_a_model_that_fits_nowhere_is_refused_and_no_more(
    config: Path, model: Path, capsys: Capture
) -> None:
    little = ["--model", str(model), "--gpu-memory", "0.001", "--host-memory", "0.001"]
    assert cli.main(["explain", str(config), *little]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Does not fit: ")
    assert "try a larger GPU and more host memory. Model: " in text
    assert "A run would be refused: " in text
    assert "Fits" not in text
    assert cli.main(["explain", str(config), *little, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["decision"]["reason"] == "no number fits"


@pytest.mark.parametrize(
    ("gpu", "host", "words"),
    [
        (1.1, 64, "the weights alone take 1.25 GiB of the GPU's 1.10 GiB; try ZeRO stage 3 with"),
        (
            3,
            4,
            'memory (both, with 9 of 42 layers on the GPU) missing; try "hytrain.moments": "8bit".',
        ),
        (1.1, 6.5, '"offload_param": {"device": "cpu"} and "hytrain.moments": "8bit".'),
        (1.1, 1, '"hytrain.master": "split" and 5.24 GiB of host memory.'),
    ],
)
def test_what_to_try_is_what_fits(
    gpu: float, host: float, words: str, config: Path, model: Path, capsys: Capture
) -> None:
    large = {"num_hidden_layers": 40, "hidden_size": 1024, "intermediate_size": 4096}
    (model / "config.json").write_text(json.dumps(LLAMA | large))
    reserves = {"gpu_memory_reserve_bytes": 0, "host_memory_reserve_bytes": 0}
    config.write_text(json.dumps(CONFIG | {"hytrain": {"solver": reserves}}))
    call = ["--model", str(model), "--gpu-memory", str(gpu), "--host-memory", f"{host}GiB"]
    assert cli.main(["explain", str(config), *call]) == 1
    assert words in " ".join(capsys.readouterr().out.split())


def test_all_advice_is_what_fits(config: Path, model: Path, capsys: Capture) -> None:
    """Amounts and ranks that are advised are asked about in turn: the model then fits."""
    large = {"num_hidden_layers": 40, "hidden_size": 1024, "intermediate_size": 4096}
    (model / "config.json").write_text(json.dumps(LLAMA | large))

    def explained(change: Any, *flags: object) -> tuple[int, Any]:
        path = config.with_name("changed.json")
        path.write_text(json.dumps(CONFIG | change))
        call = ["explain", str(path), "--model", str(model), "--json", *map(str, flags)]
        return cli.main(call), json.loads(capsys.readouterr().out)

    def advised(change: Any, *flags: object) -> list[str]:
        status, found = explained(change, *flags)
        assert status == 1
        assert f"; try {found['advice'][0]}." in found["verdict"]
        assert not any("checkpointing" in line for line in found["advice"])
        return found["advice"]

    # The host is short: more of it, as the keys want it; a smaller reserve would not do.
    lines = advised({}, "--gpu-memory", 4, "--host-memory", 3)
    assert not any("reserve" in line for line in lines)
    amounts = [re.fullmatch(r"(.* and |)([\d.]+) GiB of host memory", line) for line in lines]
    needed = {one[1]: float(one[2]) for one in amounts if one}
    assert list(needed.values()) == sorted(needed.values())
    for section in ({}, {"moments": "8bit"}, {"moments": "8bit", "master": "split"}):
        words = "".join(f'"hytrain.{key}": "{value}" and ' for key, value in section.items())
        memory = ("--gpu-memory", 4, "--host-memory", needed[words] + 0.01)
        assert explained({"hytrain": section}, *memory)[0] == 0
    # The GPU is short of gradients that the first backward keeps: stage 3 on the same ranks.
    two = ("--gpu-memory", 3, "--host-memory", 64, "--ranks", 2)
    lines = advised({}, *two)
    assert lines[0] == "ZeRO stage 3"
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert explained({"zero_optimization": zero}, *two)[0] == 0
    # More ranks hold what the host does not.
    memory = ("--gpu-memory", 8, "--host-memory", 4)
    words = "2 ranks in ZeRO stage 3, each with such a GPU, and this host memory for all"
    assert words in advised({}, *memory)
    assert explained({"zero_optimization": zero}, *memory, "--ranks", 2)[0] == 0
    # A number that is fixed, and too large for the memory as well.
    memory = ("--gpu-memory", 4, "--host-memory", 6.5)
    change = {"hytrain": {"gpu_fraction": 0.9}}
    first = '"hytrain.moments": "bf16", with "hytrain.gpu_fraction": "solve"'
    assert advised(change, *memory)[0] == first
    assert explained({"hytrain": {"gpu_fraction": 0.9, "moments": "bf16"}}, *memory)[0] == 1
    assert explained({"hytrain": {"gpu_fraction": "solve", "moments": "bf16"}}, *memory)[0] == 0
    # Inputs of blocks: only where they are counted, and are what is too much.
    lines = advised({}, "--gpu-memory", 4, "--host-memory", 64, "--seq", 100_000)
    assert lines[0] == "smaller micro-batches or shorter samples: without --seq it fits"


def test_weights_on_the_host_have_a_row(config: Path, model: Path, capsys: Capture) -> None:
    cpu = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}
    zero["stage3_param_persistence_threshold"] = 0
    weights = 2 * (3 * BLOCK + 2 * 256 * 64 + 64)
    for change, is_there in (({}, False), ({"zero_optimization": zero}, True)):
        config.write_text(json.dumps(CONFIG | change))
        call = ["--model", str(model), "--gpu-memory", "8", "--host-memory", "16"]
        assert cli.main(["explain", str(config), *call]) == 0
        rows = capsys.readouterr().out.splitlines()
        found = [row for row in rows if row.startswith("host: weights, pinned")]
        assert bool(found) == is_there
        assert all(row.split()[-2:] == [f"{weights / 1024:.0f}", "KiB"] for row in found)


def test_a_micro_batch_that_a_trainer_fills_in_is_one_sample(
    config: Path, model: Path, capsys: Capture
) -> None:
    for sizes, words, samples in (
        ({"train_micro_batch_size_per_gpu": "auto"}, "for 1 sample (the trainer fills the", 1),
        ({"train_micro_batch_size_per_gpu": 4}, "for a micro-batch of 4, 1,001 tokens", 4),
        ({"train_batch_size": 12, "gradient_accumulation_steps": 2}, "for a micro-batch of 6,", 6),
    ):
        rest = {key: value for key, value in CONFIG.items() if "batch" not in key}
        config.write_text(json.dumps(rest | sizes))
        call = ["explain", str(config), "--model", str(model), "--host-memory", "16"]
        assert cli.main([*call, "--seq", "1001"]) == 0
        assert words in " ".join(capsys.readouterr().out.split())
        assert cli.main([*call, "--seq", "1001", "--json"]) == 0
        inputs = json.loads(capsys.readouterr().out)["block_input_bytes"]
        assert inputs == samples * 2 * 1001 * 64 * 3


def test_options_are_refused_before_torch_is_imported(config: Path) -> None:
    code = (
        "import sys; from hytrain.tools import cli; "
        f"status = cli.main(['explain', {str(config)!r}, '--gpu-memory', '80']); "
        "sys.exit('torch' in sys.modules or status != 2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "words", ["checkpoint info x", "checkpoint merge x --out y", "export x --out y"]
)
def test_a_folder_that_is_none_is_told_before_torch_is_imported(words: str) -> None:
    code = (
        "import sys; from hytrain.tools import cli; "
        f"status = cli.main({words.split()!r}); "
        "sys.exit('torch' in sys.modules or status != 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "x is no folder: give the folder that checkpoints were saved in" in done.stderr


def test_memory_in_another_unit_is_refused(config: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", str(config), "--gpu-memory", "80GB"])
    words = "write a plain number (a GPU of 80 GB has about 78 to use)"
    assert f"'80GB' is not a number above 0 of GiB: {words}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["explain", str(config), "--host-memory", "-5"])
    assert "'-5' is not a number above 0 of GiB (`hyt" in capsys.readouterr().err


def test_weights_that_are_sharded_or_on_the_host(
    tmp_path: Path, config: Path, model: Path, capsys: Capture
) -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    }

    def sizes(ranks: int, **keys: Any) -> tuple[int, int]:
        written = json.loads(config.read_text(encoding="utf-8"))
        written["zero_optimization"] = {**zero, **keys}
        path = tmp_path / "zero3.json"
        path.write_text(json.dumps(written))
        arguments = ["--model", str(model), "--ranks", str(ranks), "--host-memory", "16"]
        arguments += ["--gpu-memory", "8", "--json"]
        assert cli.main(["explain", str(path), *arguments]) == 0
        result = json.loads(capsys.readouterr().out)
        return result["decision"]["limits"]["gpu_base"], 2 * result["parameters"]

    resident, whole = sizes(1)
    assert resident == pytest.approx(whole, rel=0.02)
    largest = 2 * max(256 * 64, BLOCK)  # bf16
    streamed, _ = sizes(1, offload_param={"device": "cpu"})
    assert streamed == pytest.approx(largest + 2 * largest, rel=0.1)
    shared, _ = sizes(2)
    assert shared == pytest.approx(whole / 2 + largest + 2 * largest, rel=0.1)


def test_inputs_of_blocks(config: Path, model: Path, capsys: Capture) -> None:
    """Ranks that share a sequence have a part of it each."""
    for degree, tokens in ((1, 1001), (2, 501)):
        config.write_text(json.dumps(CONFIG | {"sequence_parallel_size": degree}))
        arguments = ["--model", str(model), "--host-memory", "16", "--seq", "1001"]
        assert cli.main(["explain", str(config), *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["tokens"], found["block_input_bytes"]) == (tokens, 2 * tokens * 64 * 3)
        assert cli.main(["explain", str(config), *arguments]) == 0
        text = capsys.readouterr().out
        assert f"{tokens:,} tokens of each sample on this rank" in " ".join(text.split())
    told = json.loads(config.read_text())
    told["hytrain"]["solver"] = {"host_activation_bytes": 2**30}
    config.write_text(json.dumps(told))
    assert cli.main(["explain", str(config), *arguments]) == 0
    assert "host: offloaded activations" in capsys.readouterr().out
    assert "--seq: needs --model" in _error(capsys, config, "--seq", 5)


def test_samples_beyond_a_models_positions_are_warned_of(
    config: Path, model: Path, capsys: Capture
) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 256}))
    call = ["explain", str(config), "--model", str(model), "--host-memory", "16", "--seq"]
    for tokens in (256, 257):
        assert cli.main([*call, str(tokens)]) == 0
        text = " ".join(capsys.readouterr().out.split())
        words = f"Warning: --seq {tokens}: {model} has max_position_embeddings 256: give at most"
        assert (words in text) == (tokens == 257)


def test_ranks_that_share_sequences(config: Path, model: Path, capsys: Capture) -> None:
    """What training refuses is refused, where the ranks are given."""
    shared = CONFIG | {"sequence_parallel_size": 2}
    config.write_text(json.dumps(shared))
    memory = ["--model", str(model), "--host-memory", "16"]
    for more in ([], [*memory, "--ranks", "4"]):
        assert cli.main(["explain", str(config), *more, "--verbose"]) == 0
        assert "2 ranks share each sequence" in capsys.readouterr().out
    assert "but the job has 3 ranks" in _error(capsys, config, *memory, "--ranks", 3)
    for dealt in ({"batch_sizes": [2, 1]}, {"plan": "plan.json"}):
        config.write_text(json.dumps(shared | {"hytrain": dealt}))
        assert "deals samples to single ranks, but 2 ranks" in _error(capsys, config)


def test_inputs_of_blocks_are_counted_on_the_gpu(
    config: Path, model: Path, capsys: Capture
) -> None:
    config.write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": 8}))
    arguments = ["--model", str(model), "--host-memory", "16", "--gpu-memory", "4", "--json"]
    found: list[dict[str, Any]] = []
    for seq, status in (([], 0), (["--seq", "1001"], 0), (["--seq", "1310720"], 1)):
        assert cli.main(["explain", str(config), *arguments, *seq]) == status
        found.append(json.loads(capsys.readouterr().out))
    inputs = 8 * 2 * 1001 * 64 * 3
    assert found[1]["block_input_bytes"] == inputs
    bases = [one["decision"]["limits"]["gpu_base"] for one in found]
    assert bases[1] - bases[0] == inputs


def test_all_refusals_come_at_once(config: Path, capsys: Capture) -> None:
    values = json.loads(config.read_text())
    wrong = {"zero_optimization": {"stage": "2", "offload_optimizer": {"device": "nvme"}}}
    wrong |= {"gradient_clipping": "1", "optimizer": {"type": "AdamW", "params": {"lrr": 1}}}
    config.write_text(json.dumps(values | wrong | {"hytrain": {"momemts": "bf16"}}))
    parts = _error(capsys, config, lines=5).splitlines()
    assert (
        sum(part.endswith(("write 1 without quotes", "write 2 without quotes")) for part in parts)
        == 2
    )
    keys = ("gradient_clipping", "zero_optimization.stage")
    for words in (*keys, "nvme", 'did you mean "moments"?', 'did you mean "lr"?'):
        assert any(words in part for part in parts)
    zero = values.pop("zero_optimization")
    config.write_text(json.dumps(values | {"zero_optimisation": zero}))
    assert 'stage" is missing (there is "zero_optimisation")' in _error(capsys, config, lines=3)
    twice = {**zero, "stag": 2, "offload_optimiser": {}}
    config.write_text(json.dumps(values | {"zero_optimization": twice}))
    text = _error(capsys, config, lines=2)
    assert 'did you mean "stage"?\n  "zero_optimization.offload_optimiser"' in text


def test_all_wrong_keys_are_told_apart(config: Path, capsys: Capture) -> None:
    config.write_text(json.dumps(CONFIG | {"hytrain": {"momemts": "fp32", "master": "bf"}}))
    text = _error(capsys, config, lines=2)
    assert 'hytrain.momemts: unknown key; did you mean "moments"' in text


def test_an_interrupt_is_one_line(
    config: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hytrain.tools.cli.explain._read", interrupted)
    assert cli.main(["explain", str(config)]) == 130
    assert capsys.readouterr().err == "hytrain: interrupted\n"


def test_ranks_divide_state_and_host(config: Path, model: Path, capsys: Capture) -> None:
    arguments = ["--model", str(model / "config.json"), "--ranks", "2", "--host-memory", "16"]
    assert cli.main(["explain", str(config), *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["decision"]["limits"]["host"] == 8 * 1024**3
    assert result["decision"]["layer_bytes"][1]["parameters"] == BLOCK // 2
    assert "ranks count from 0" in _error(capsys, config, *arguments, "--rank", 2)
    alone = (config, "--model", model, "--rank", 1)
    assert "--rank 1: ranks count from 0, and --ranks is 1" in _error(capsys, *alone)


def test_batches_are_for_as_many_ranks(config: Path, model: Path, capsys: Capture) -> None:
    """Without --ranks for those that the sizes are for."""
    config.write_text(json.dumps(CONFIG | {"hytrain": {"batch_sizes": [4, 2]}}))
    call = (config, "--model", model, "--host-memory", 16)
    words = '"hytrain.batch_sizes" has 2 numbers but the job has 3 ranks: give one number a rank'
    assert words in _error(capsys, *call, "--ranks", 3)
    assert cli.main(["explain", *map(str, call), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["decision"]["layer_bytes"][1]["parameters"] == BLOCK // 2
    config.write_text(json.dumps(CONFIG | {"hytrain": {"micro_batch_sizes": [4, 2]}}))
    assert 'needs "hytrain.batch_sizes"' in _error(capsys, config)


def test_models_that_cannot_be_built(config: Path, model: Path, capsys: Capture) -> None:
    words = "nothing is downloaded: give a transformers config.json or its folder, as from `hf "
    text = _error(capsys, config, "--model", "Some/Model-1.7B")
    assert f"{words}download Some/Model-1.7B config.json --local-dir Model-1.7B`" in text
    for path in (model / "other.json", model.parent, "gone.json"):
        text = _error(capsys, config, "--model", path)
        assert "No such file" in text
        assert f"{words}download NAME config.json --local-dir DIR`" in text
    (model / "config.json").write_text('{"model_type": "no-such-model"}')
    text = _error(capsys, config, "--model", model)
    assert "config (ValueError: Unrecognized model identifier: no-such-model.): it must" in text
    (model / "config.json").write_text("[]")
    assert "not a transformers config" in _error(capsys, config, "--model", model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**8}, '"num_hidden_layers" is 100,000,000: give the number of'),
        ({"text_config": {"n_layer": 1_001}}, '"n_layer" is 1,001: give the number of layers, 1,0'),
        ({"hidden_size": 10**9}, "1.2e+19 parameters, of at most 1e+13: correct its sizes"),
    ],
)
def test_models_of_absurd_sizes(
    config: Path, model: Path, capsys: Capture, change: dict[str, Any], words: str
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | change))
    assert words in _error(capsys, config, "--model", model)
    out = model / "out.json"
    for call in (
        ["plan", "--gpus", "l4", "--batch", "1", "--seq-len", "8"],
        ["profile", "--seq-len", "8", "--out", str(out)],
    ):
        assert cli.main([*call, "--model", str(model)]) == 2
        assert words in capsys.readouterr().err
    assert not out.exists()


def test_without_transformers_the_extra_is_named(
    config: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install hytrain[train]" in _error(capsys, config, "--model", model)


def test_a_metrics_file_needs_no_torch(metrics: Path) -> None:
    code = (
        "import sys; from hytrain.tools import cli; "
        f"cli.main(['explain', {str(metrics)!r}]); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_leaves_early_is_no_error(metrics: Path) -> None:
    command = [sys.executable, "-m", "hytrain", "explain", str(metrics)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141  # as a shell tells of SIGPIPE


@pytest.mark.parametrize("gpu_fraction", ["solve", 0.0])
def test_where_split_master_weights_are_previewed(
    gpu_fraction: float | str, config: Path, model: Path, capsys: Capture
) -> None:
    def explained(*flags: str) -> Any:
        cli.main(["explain", str(config), *flags])  # not 0 where split ones do not fit either
        return capsys.readouterr().out

    reserves = {"gpu_memory_reserve_bytes": 0, "host_memory_reserve_bytes": 0}
    section = {"master": "split", "gpu_fraction": gpu_fraction, "solver": reserves}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hytrain": section}))
    words = " ".join(explained().split())
    assert "2 bytes of master weight beside the bf16 weight" in words
    assert "(of layers on the CPU 4, whole, where memory allows)" in words

    def planned(host: float) -> tuple[int, str]:
        sizes = ["--gpu-memory", "0.03125", "--host-memory", f"{host:.15f}"]
        found = json.loads(explained("--model", str(model), *sizes, "--json"))["decision"]
        needed = sum(
            layer["parameters"] * (14 if layer["host_master"] == "fp32" else 12)
            for layer in found["layer_bytes"]
        )
        return needed + found["staging_bytes"], found["host_master_reason"]

    text = explained("--model", str(model), "--gpu-memory", "1", "--host-memory", "64")
    assert "`hytrain plan --gpus`" in " ".join(text.split())
    needed, why = planned(64.0)
    needed += 2 * 4 * 256 * 64  # a save's two fp32 states of the largest parameter
    assert why.endswith("layers on the CPU are whole, and updates there previewed")
    assert planned(needed / 2**30)[1] == why
    less, why = planned((needed - 4096) / 2**30)
    assert "the last 1 of 5 layers on the CPU are split, too" in why
    assert needed - less >= 4096


def test_a_fixed_number_that_does_not_fit_is_no_success(
    config: Path, model: Path, capsys: Capture
) -> None:
    text = json.loads(config.read_text()) | {"hytrain": {"gpu_fraction": 1.0}}
    config.write_text(json.dumps(text))
    call = ["explain", str(config), "--model", str(model), "--host-memory", "64"]
    assert cli.main([*call, "--gpu-memory", "1000"]) == 0
    text = capsys.readouterr().out
    assert "For an estimate of the step time: `hytrain plan" in " ".join(text.split())
    assert cli.main([*call, "--gpu-memory", "1", "--verbose"]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "fits only in what is kept in reserve: the run would start, and take that." in words
    assert cli.main([*call, "--gpu-memory", "0.001"]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "the run would be refused. No number fits; try " in words
    assert cli.main([*call, "--gpu-memory", "1.0015"]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert 'GPU layers fit: set "hytrain.gpu_fraction": "solve", or a share of these.' in words
    # State, weights and reserve, but not the gradients that wait for their update.
    assert cli.main([*call, "--gpu-memory", f"{15 * PARAMETERS / 2**30:.15f}"]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "more than the GPU has: the run would fail in its first step." in words
    call[-1] = "0.001"
    assert cli.main([*call, "--gpu-memory", "64"]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "more than the host has: the system may end the run." in words


def test_offloaded_activations_count_beside_a_fixed_number(
    config: Path, model: Path, capsys: Capture
) -> None:
    section = {"gpu_fraction": 0.0, "solver": {"host_activation_bytes": 2 << 30}}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hytrain": section}))
    call = ["explain", str(config), "--model", str(model), "--gpu-memory", "64"]
    assert cli.main([*call, "--host-memory", "2"]) == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "more than the host has: the system may end the run." in words


def test_what_training_starts_with_is_not_asked_of_a_fixed_number(
    config: Path, model: Path
) -> None:
    section = {"gpu_fraction": 0.5, "solver": {"start": [1, 2]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hytrain": section}))
    call = ["explain", str(config), "--model", str(model), "--gpu-memory", "64"]
    assert cli.main([*call, "--host-memory", "64"]) == 0


def test_muon(config: Path, model: Path, capsys: Capture) -> None:
    """Its matrices are layers of their own, whose gradients wait on the GPU wherever they are."""
    muon = CONFIG | {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}
    config.write_text(json.dumps(muon | {"hytrain": {"master": "split"}}))
    assert '"hytrain.master" is "split" and the optimizer is Muon' in _error(capsys, config)
    config.write_text(json.dumps(muon | {"hytrain": {"moments": "bf16"}}))
    call = ["explain", str(config), "--model", str(model), "--verbose", "--gpu-memory"]
    assert cli.main([*call, "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "8 layers (3 blocks in 6 pieces" in text
    assert "4 bytes of master weight (fp32) and 2 of momentum (bf16)" in text
    assert "k: of the state all that fits is on the GPU" in text
    assert "on the GPU); training may move up to 8 there, where activations leave room: " in text
    size = {"hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 65536}
    (model / "config.json").write_text(json.dumps(LLAMA | size))
    assert cli.main([*call, "4", "--host-memory", "2"]) == 1
    text = capsys.readouterr().out
    assert "GiB of host memory" in text
    assert '"hytrain.master"' not in text
    assert "`hytrain plan" not in text  # which is made for Adam


@pytest.mark.skipif(torch.cuda.is_available(), reason="DeepSpeed finds the GPU")
def test_without_a_gpu_deepspeed_does_not_warn_of_that(config: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    command = [sys.executable, "-m", "hytrain", "explain", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""
