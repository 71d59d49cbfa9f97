"""Each file of examples/ trains a tiny model on this machine, for as many steps as it is asked."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port
from support.scripts import run_script

from hytrain.tools.cli import main

transformers: Any = pytest.importorskip("transformers", reason="the examples are of transformers")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
TEXT = "the quick brown fox jumps over the lazy dog . " * 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dense model and a mixture of experts, each with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models")
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(TEXT.split())}, unk_token="."))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    shape = {
        "vocab_size": 1 + max(words.get_vocab().values()), "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for name, config in (
        ("dense", transformers.LlamaConfig(**shape)),
        ("mixture", transformers.Qwen3MoeConfig(**shape, **experts, head_dim=16)),
    ):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token=".")
        tokenizer.save_pretrained(folder / name)
    (folder / "text").write_text(TEXT)
    return folder


def _run(command: list[str], folder: Path, **more: str) -> str:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    here = f"import os; os.chdir({str(folder)!r}); __file__ = {command[0]!r}\n"
    text = here + Path(command[0]).read_text()
    run = run_script(text, *command[1:], **rank, MASTER_PORT=str(free_port()), **more)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "hytrain 0" in run.stderr, "the line at the start"
    return run.stdout + run.stderr


def _needs(module: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("plain_loop", "dense"),
        pytest.param("trainer", "dense", marks=pytest.mark.experiment),
        pytest.param("accelerate_loop", "dense", marks=pytest.mark.experiment),
        pytest.param("mixture", "mixture", marks=pytest.mark.experiment),
        pytest.param("lora", "dense", marks=[pytest.mark.experiment, _needs("peft")]),
    ],
)
def test_a_script(name: str, model: str, models: Path, tmp_path: Path) -> None:
    options = ["--text", str(models / "text"), "--length", "16", "--steps", "20"]
    options += ["--save", "model"] * (name == "trainer")
    script = str(EXAMPLES / f"{name}.py")
    text = _run([script, "--model", str(models / model), *options], tmp_path)
    losses = [float(found) for found in re.findall(r"loss'?:? '?([0-9.]+)", text)]
    assert len(losses) >= 4
    assert all(0 < loss < 10 for loss in losses)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert sum("step_s" in json.loads(line) for line in lines) == 20
    if name == "trainer":
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
        assert str(saved.dtype) == "torch.bfloat16"


@pytest.mark.experiment
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None,
    reason="trl or datasets is not installed",
)
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_trl(kind: str, models: Path, tmp_path: Path) -> None:
    def said(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    asked = said("user", "the quick brown fox")
    rows: list[dict[str, Any]] = []
    for number in range(40):
        words = " ".join(TEXT.split()[number % 5 : number % 5 + 4])
        right, wrong = said("assistant", words), said("assistant", "lazy lazy")
        pair = {"prompt": asked, "chosen": right, "rejected": wrong}
        rows.append(pair if kind == "dpo" else {"messages": asked + right})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "dense")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} . {% endfor %}"
    tokenizer.eos_token = tokenizer.pad_token = "."
    for file in (models / "dense").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    options = ["--data", str(tmp_path / "data.jsonl"), "--length", "32", "--steps", "20"]
    options += ["--save", "model"] + ["--dpo"] * (kind == "dpo")
    text = _run([str(EXAMPLES / "sft.py"), "--model", str(tmp_path), *options], tmp_path)
    losses = [float(found) for found in re.findall(r"'loss': '?([0-9.]+)", text)]
    assert losses[-1] < losses[0]
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert str(saved.dtype) == "torch.bfloat16"


@pytest.mark.experiment
def test_weights_for_a_second_process(models: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), str(EXAMPLES / "handover.py"), "--model", str(models / "dense"),
        "--text", str(models / "text"), "--length", "16", "--steps", "10",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    pairs = re.findall(r"loss ([0-9.]+), in the second process ([0-9.]+)", run.stdout)
    assert len(pairs) == 2
    assert all(here == there for here, there in pairs)
    assert pairs[0] != pairs[1]


@pytest.mark.experiment
def test_two_ranks_that_share_sequences(models: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), str(EXAMPLES / "long_context.py"), "--model", str(models / "dense"),
        "--text", str(models / "text"), "--length", "16", "--steps", "20",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks share each sequence" in run.stderr
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", run.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] < 10


def _json(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"```json\n(\{.*?\})\n```", text, flags=re.DOTALL)


def _with_keys(page: str) -> list[str]:
    """The quickstart's configuration, with the keys that each fragment of a page has otherwise."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r'```json\n(".*?)\n```', text, flags=re.DOTALL)
    whole = json.loads(_json("quickstart.md")[0])
    return [json.dumps(whole | json.loads(f"{{{keys}}}")) for keys in found]


def test_the_recipes_have_their_keys() -> None:
    changed = [json.loads(config) for config in _with_keys("recipes.md")]
    assert [one["zero_optimization"]["stage"] for one in changed] == [3, 2, 3]
    assert [one["hytrain"].get("master") for one in changed] == [None, "split", None]


@pytest.mark.experiment
@pytest.mark.parametrize("config", [_json("quickstart.md")[0], *_with_keys("recipes.md")])
def test_a_recipe_trains(config: str, models: Path, tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(config)
    options = ["--config", str(tmp_path / "ds_config.json"), "--batch", "4", "--length", "16"]
    data = ["--model", str(models / "dense"), "--text", str(models / "text"), "--steps", "10"]
    printed = _run([str(EXAMPLES / "trainer.py"), *options, *data], tmp_path)
    stage = json.loads(config)["zero_optimization"]["stage"]
    assert f"ZeRO-{stage}" in printed
    section = json.loads(config)["hytrain"]
    split = "split master weights, " * (section.get("master") == "split")
    assert f"Adam state ({split}{section['moments']} moments)" in printed, printed


@pytest.mark.experiment
def test_the_loop_of_the_quickstart(models: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    code = next(
        c for c in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "engine." in c
    )
    for written, here in (
        ('"Qwen/Qwen3-8B", 1024', f"{str(models / 'dense')!r}, 16"),
        ('"book.txt"', repr(str(models / "text"))),
    ):
        assert code.count(written) == 1, written
        code = code.replace(written, here)
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "ds_config.json").write_text(_json("quickstart.md")[-1])
    _run([str(tmp_path / "train.py")], tmp_path)
    assert (tmp_path / "checkpoints" / "latest").exists()


@pytest.mark.experiment
def test_the_tutorial_from_data_to_an_exported_model(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    code, load = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    for written, here in (
        ('"Qwen/Qwen3-8B", 1024', f"{str(models / 'dense')!r}, 16"),
        ('"book.txt"', repr(str(models / "text"))),
        ("bf16=True,", 'bf16=True, use_cpu=True, report_to="none",'),
        ("max_steps=200", "max_steps=8 if '--resume' in sys.argv else 4"),
        ("save_steps=100", "save_steps=2"),
    ):
        assert code.count(written) == 1, written
        code = code.replace(written, here)
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "ds_config.json").write_text(_with_keys("tutorial.md")[0])
    _run([str(tmp_path / "train.py")], tmp_path)
    _run([str(tmp_path / "train.py"), "--resume"], tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "step_s" in json.loads(line)]
    assert steps == list(range(1, 9))
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "metrics.jsonl"]) == 0
    assert main(["checkpoint", "verify", "out"]) == 0
    assert main(["export", "out", "--out", "model"]) == 0
    exec(load, {})


@pytest.mark.experiment
def test_the_loop_of_the_page_on_unequal_gpus(models: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "unequal_gpus.md").read_text()
    code = next(c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "engine" in c)
    for written, here in (
        ('"Qwen/Qwen3-4B", 2048', f"{str(models / 'dense')!r}, 16"),
        ('"book.txt"', repr(str(models / "text"))),
    ):
        assert code.count(written) == 1, written
        code = code.replace(written, here)
    ending = "print('rank', engine.global_rank, shares.sizes, float(loss))\nengine.destroy()"
    code = code.replace("engine.destroy()", ending)
    start = 'import deepspeed\ndeepspeed.init_distributed("gloo")\n'
    (tmp_path / "train.py").write_text(start + code)
    (tmp_path / "ds_config.json").write_text(_json("unequal_gpus.md")[0])

    def on_two_ranks(*command: str) -> str:
        ranks = ["--nproc-per-node", "2", "--master-port", str(free_port())]
        command = sys.executable, "-m", "torch.distributed.run", *ranks, *command
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    profile, plan = str(tmp_path / "profile.json"), str(tmp_path / "plan.json")
    options = ["--seq-len", "16", "--seconds", "2", "--out", profile]
    on_two_ranks("-m", "hytrain", "profile", "--model", str(models / "dense"), *options)
    deepspeed = ["--deepspeed-config", str(tmp_path / "ds_config.json")]
    assert main(["plan", "--profile", profile, "--batch", "7", "--out", plan, *deepspeed]) == 0
    sizes = [rank["batch_size"] for rank in json.loads(Path(plan).read_text())["ranks"]]
    text = on_two_ranks("train.py")
    for rank in range(2):
        assert f"rank {rank} {tuple(sizes)} " in text
    assert (tmp_path / "checkpoints" / "latest").exists()


@pytest.mark.experiment
def test_the_trainer_of_the_page_on_long_context(models: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "long_context.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0]
    for written, here in (
        ('"Qwen/Qwen3-1.7B", 32768, "flash_attention_2"', f'{str(models / "dense")!r}, 16, "sdpa"'),
        ("sp_size=4", "sp_size=2"),
        ('"book.txt"', repr(str(models / "text"))),
        ("bf16=True,", "bf16=True, use_cpu=True, max_steps=20, logging_steps=5,"),
    ):
        assert code.count(written) == 1, written
        code = code.replace(written, here)
    start = 'import deepspeed\ndeepspeed.init_distributed("gloo")\n'
    (tmp_path / "train.py").write_text(start + code)
    quickstart = (ROOT / "docs" / "quickstart.md").read_text()
    config = re.findall(r"```json\n(.*?)```", quickstart, flags=re.DOTALL)[0]
    (tmp_path / "ds_config.json").write_text(config)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), str(tmp_path / "train.py"),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 ranks share each sequence" in run.stderr
    losses = [float(found) for found in re.findall(r"'loss': '?([0-9.]+)", run.stdout)]
    assert losses[-1] < losses[0] < 10


@pytest.mark.experiment
def test_the_notebook(models: Path, tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(code)
    assert "loss " in _run([str(tmp_path / "cells.py")], tmp_path, MODEL=str(models / "dense"))


def test_all_are_tested_and_listed() -> None:
    listed = set(re.findall(r"^\| \[(\S+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
