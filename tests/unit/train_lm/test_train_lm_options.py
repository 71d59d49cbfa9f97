"""The command line, what it changes in the DeepSpeed JSON, and the models that it names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import ds_config
import models
import pytest
import torch
from data import BatchPlan
from options import DEMO_CPU, DEMO_GPU, OptionError, build_parser, parse_options
from support.plans import a_plan, write_a_plan


def _parse(*argv: str, on_gpu: bool = False) -> argparse.Namespace:
    parser = deepspeed.add_config_arguments(build_parser())
    return parse_options(parser, argv, on_gpu=on_gpu)


def _config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 1000, "warmup_num_steps": 100},
        },
        "hytrain": {"gpu_fraction": 0.0},
    }


def test_launcher_arguments_are_accepted() -> None:
    options = _parse("--local_rank=1", "--deepspeed", "--deepspeed_config", "x.json")
    assert options.local_rank == 1
    assert options.deepspeed_config == Path("x.json")
    assert _parse("--resume").resume == "latest"
    assert _parse("--resume", "step7").resume == "step7"


def test_demo_is_the_machines_and_options_win() -> None:
    assert _parse("--demo").model == DEMO_CPU["model"]
    assert _parse("--demo", on_gpu=True).model == DEMO_GPU["model"]
    chosen = _parse("--demo", "--steps", "12", "--model", "gpt2")
    assert (chosen.steps, chosen.model, chosen.lr) == (12, "gpt2", DEMO_CPU["lr"])
    assert chosen.overwrite
    assert not _parse("--demo", "--resume").overwrite


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--steps", "0"], "--steps is 0; 1 is the least"),
        (["--seq-len", "1"], "--seq-len is 1; 2"),
        (["--micro-batch", "0"], "--micro-batch is 0"),
        (["--save-every", "-1"], "--save-every is -1"),
        (["--lr", "nan"], "--lr is nan"),
        (["--lr", "0"], "--lr is 0.0"),
        (["--gpu-fraction", "1.5"], r"\[0, 1\]"),
        (["--gpu-fraction", "nan"], r'in \[0, 1\], or "solve"'),
        (["--gpu-fraction", "0.5", "--engine", "deepspeed"], "--engine deepspeed"),
        (["--gpu-fraction", "solve", "--engine", "deepspeed"], "--engine deepspeed"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--warmup", "10", "--steps", "10"], "--warmup 10"),
    ],
)
def test_unusable_options(argv: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        _parse(*argv)


def test_gpu_fraction_is_a_number_or_solve(capsys: pytest.CaptureFixture[str]) -> None:
    assert _parse("--gpu-fraction", "0.25").gpu_fraction == 0.25
    assert _parse("--gpu-fraction", "solve").gpu_fraction == "solve"
    with pytest.raises(SystemExit):
        _parse("--gpu-fraction", "all")
    assert 'all is neither a number in [0, 1] nor "solve"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "config", "world_size", "expected"),
    [
        ([], {"train_micro_batch_size_per_gpu": 8}, 2, (8, 1)),
        ([], {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}, 2, (8, 4)),
        ([], {"train_batch_size": 32}, 4, (8, 1)),
        ([], {"train_batch_size": 32, "gradient_accumulation_steps": 2}, 4, (4, 2)),
        (["--micro-batch", "2"], {"train_batch_size": 32}, 4, (2, 4)),
        (["--global-batch", "64"], {"train_micro_batch_size_per_gpu": 8}, 2, (8, 4)),
        (["--global-batch", "12", "--micro-batch", "3"], {}, 1, (3, 4)),
    ],
)
def test_batches(
    argv: list[str], config: dict[str, Any], world_size: int, expected: tuple[int, int]
) -> None:
    plan = ds_config.plan_batches(config, _parse(*argv), world_size)
    assert (plan.micro_batch, plan.accumulation) == expected


def test_batches_that_do_not_divide() -> None:
    with pytest.raises(OptionError, match="no multiple of micro-batch 8 times 2 ranks = 16"):
        ds_config.plan_batches(_config(), _parse("--global-batch", "24"), 2)
    with pytest.raises(OptionError, match="--micro-batch"):
        ds_config.plan_batches({}, _parse(), 1)


def _apply(config: dict[str, Any], *argv: str) -> tuple[dict[str, Any], list[str]]:
    plan = BatchPlan(micro_batch=8, accumulation=2, world_size=1)
    return ds_config.apply_options(config, _parse(*argv), plan)


def test_options_are_written_and_reported() -> None:
    original = _config()
    config, changes = _apply(
        original, "--lr", "0.01", "--steps", "50", "--warmup", "5", "--gpu-fraction", "0.5"
    )
    assert config["optimizer"]["params"]["lr"] == 0.01
    assert config["scheduler"]["params"] == {"total_num_steps": 50, "warmup_num_steps": 5}
    assert config["hytrain"]["gpu_fraction"] == 0.5
    assert config["train_batch_size"] == 16
    assert len(changes) == 4
    assert "optimizer.params.lr: 0.001 -> 0.01" in changes
    assert original == _config(), "the caller's dictionary is left as it was"
    config, changes = _apply(original, "--steps", "1000", "--gpu-fraction", "solve")
    assert config["hytrain"]["gpu_fraction"] == "solve"
    assert changes == ["hytrain.gpu_fraction: 0.0 -> solve"]


def test_nothing_asked_nothing_changed() -> None:
    config, changes = _apply(_config(), "--steps", "1000")
    assert changes == []
    assert config == {**_config(), "train_batch_size": 16}


def test_warm_up_is_shorter_than_the_run() -> None:
    config, changes = _apply(_config(), "--steps", "60")
    assert config["scheduler"]["params"]["warmup_num_steps"] == 6
    assert "scheduler.params.warmup_num_steps: 100 -> 6" in changes


@pytest.mark.parametrize(
    ("missing", "argv"),
    [
        ("optimizer", ["--lr", "0.01"]),
        ("scheduler", ["--warmup", "5"]),
        ("hytrain", ["--gpu-fraction", "0.5"]),
    ],
)
def test_option_without_its_section(missing: str, argv: list[str]) -> None:
    config = _config()
    del config[missing]
    with pytest.raises(OptionError, match=missing):
        _apply(config, *argv)


def test_config_chosen_by_hardware() -> None:
    for on_gpu, name in ((False, "fp32_cpu.json"), (True, "zero2_solve.json")):
        path = ds_config.choose_config(on_gpu=on_gpu)
        assert path.name == name
        assert ds_config.read_config(path)["hytrain"]["gpu_fraction"] == "solve"


def test_config_file_is_read_as_deepspeed_does(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{\n  # a comment\n  "a": {"b": 1}\n}\n')
    assert ds_config.read_config(path) == {"a": {"b": 1}}
    path.write_text('{"a": 1, "a": 2}')
    with pytest.raises(OptionError, match="a twice"):
        ds_config.read_config(path)
    path.write_text("{")
    with pytest.raises(OptionError, match="not JSON"):
        ds_config.read_config(path)
    with pytest.raises(OptionError, match="cannot be read"):
        ds_config.read_config(tmp_path / "none.json")


def _unequal() -> BatchPlan:
    return BatchPlan(micro_batch=1, accumulation=1, world_size=2, sizes=(3, 1), micro_sizes=(2, 1))


def test_a_plan_takes_the_place_of_the_batch_keys(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    options = _parse("--plan", str(path))
    config, changes = ds_config.apply_options(_config(), options, _unequal(), path)
    assert config["hytrain"]["plan"] == str(path)
    assert not {key for key in config if "batch" in key or "accumulation" in key}
    assert "train_micro_batch_size_per_gpu: 8 -> by the plan" in changes
    assert "gradient_accumulation_steps: 2 -> by the plan" in changes
    bare = {key: value for key, value in _config().items() if key != "hytrain"}
    with pytest.raises(OptionError, match='needs a "hytrain" section'):
        ds_config.apply_options(bare, options, _unequal(), path)


def test_a_json_that_contradicts_the_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    own = {**_config(), "hytrain": {"plan": "plan.json"}}
    with pytest.raises(OptionError, match="train_micro_batch_size_per_gpu is 8 in the DeepSpeed"):
        ds_config.apply_options(own, _parse(), _unequal(), path)
    del own["train_micro_batch_size_per_gpu"]
    with pytest.raises(OptionError, match="gradient_accumulation_steps is 2 in the DeepSpeed"):
        ds_config.apply_options(own, _parse(), _unequal(), path)
    # DeepSpeed wants these in a file, whoever says the batch.
    own |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    _, changes = ds_config.apply_options({**own, "train_batch_size": 4}, _parse(), _unequal(), path)
    assert not any("batch" in change or "accumulation" in change for change in changes)
    for argv in ([], ["--plan", str(path)]):
        with pytest.raises(OptionError, match=r"train_batch_size is 32 in .* 4 sequences a step"):
            ds_config.apply_options(
                {**own, "train_batch_size": 32}, _parse(*argv), _unequal(), path
            )


def test_a_plan_for_sequences_of_another_length_is_refused(tmp_path: Path) -> None:
    plan = a_plan(torch.nn.Linear(2, 2), (4,), (2,))
    model = plan.model.model_copy(update={"seq_len": 64})
    path = Path(write_a_plan(tmp_path, plan.model_copy(update={"model": model})))
    assert ds_config.planned_batches(path, _parse("--seq-len", "64")).sizes == (4,)
    for other in ("32", "128"):
        with pytest.raises(OptionError, match=f"--seq-len is {other}, but .* is for 64 tokens"):
            ds_config.planned_batches(path, _parse("--seq-len", other))
    unknown = Path(write_a_plan(tmp_path, plan))
    assert ds_config.planned_batches(unknown, _parse("--seq-len", "128")).sizes == (4,)


def test_a_plan_is_the_options_or_lies_beside_the_json(tmp_path: Path) -> None:
    json_file = tmp_path / "ds_config.json"
    asked = {"hytrain": {"plan": "plan.json"}}
    assert ds_config.find_plan({"hytrain": {}}, json_file, _parse()) is None
    with pytest.raises(OptionError, match=r"no plan .*/plan.json or plan.json:"):
        ds_config.find_plan(asked, json_file, _parse())
    with pytest.raises(OptionError, match=r"no plan plan\.json: "):
        ds_config.find_plan(asked, Path("ds_config.json"), _parse())
    for name in ("plan.json", "other.json"):
        (tmp_path / name).write_text("{}")
    assert ds_config.find_plan(asked, json_file, _parse()) == tmp_path / "plan.json"
    other = _parse("--plan", str(tmp_path / "other.json"))
    assert ds_config.find_plan(asked, json_file, other) == tmp_path / "other.json"
    with pytest.raises(OptionError, match="--global-batch: the plan"):
        ds_config.planned_batches(tmp_path / "plan.json", _parse("--global-batch", "8"))
    with pytest.raises(OptionError, match="--plan is hytrain's"):
        _parse("--plan", "plan.json", "--engine", "deepspeed")


# -- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3m", 3_426_560),
        ("llama-3b", 2_914_667_520),
        ("llama-10b", 9_843_819_520),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_sizes_that_name_them(name: str, expected: int, tmp_path: Path) -> None:
    models.model_config(name, seq_len=64).save_pretrained(tmp_path)
    for source in (name, str(tmp_path), str(tmp_path / "config.json")):
        config = models.model_config(source, seq_len=64)
        meta: Any = {"device": torch.device("meta"), "dtype": torch.bfloat16, "seed": 0}
        model = models.build_model(config, activation_checkpointing=False, **meta)
        assert models.count_parameters(model) == expected
        assert config.use_cache is False


def test_models_that_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(models.ModelError, match="llama-3b"):
        models.model_config("llama-4711b", seq_len=64)
    path = tmp_path / "config.json"
    for text in ("{", '{"hidden_size": 8}', '{"model_type": "nope"}'):
        path.write_text(text)
        with pytest.raises(models.ModelError, match="model_type"):
            models.model_config(str(path), seq_len=64)
    with pytest.raises(models.ModelError, match="--vocab-size 1024"):
        models.model_config("llama-3m", seq_len=64, min_vocab=1000)
    with pytest.raises(models.ModelError, match="1024 positions"):
        models.model_config("gpt2", seq_len=2048)
    assert models.model_config("llama-3m", seq_len=9000).max_position_embeddings == 9000


def test_vectors_are_not_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    decayed, undecayed = models.parameter_groups(model)
    assert [p.dim() for p in decayed["params"]] == [2]
    assert "weight_decay" not in decayed
    assert [p.dim() for p in undecayed["params"]] == [1, 1, 1]
    assert undecayed["weight_decay"] == 0.0
