"""What `hytrain explain` and `hytrain plan` say in the documents is what they print."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hytrain.tools.cli import main

ROOT = Path(__file__).resolve().parents[2]
QWEN: dict[str, Any] = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-4B": QWEN | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                        "num_attention_heads": 32, "tie_word_embeddings": True},
    "Qwen3-8B": QWEN | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                        "num_attention_heads": 32},
    "Qwen3-14B": QWEN | {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40,
                         "num_attention_heads": 40},
    "Qwen3-30B-A3B": QWEN | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_experts": 128,
                             "intermediate_size": 6144, "moe_intermediate_size": 768,
                             "num_experts_per_tok": 8, "num_hidden_layers": 48,
                             "num_attention_heads": 32, "num_key_value_heads": 4},
    "Qwen3-32B": QWEN | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                         "num_attention_heads": 64},
    "Llama 3.1 70B": {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
                      "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
                      "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip
SECTIONS = ({}, {"moments": "bf16"}, {"moments": "8bit"}, {"moments": "8bit", "master": "split"})


def _rows(page: str) -> dict[str, list[int]]:
    """By model: GiB of weights on the GPU, then of the host with each of SECTIONS."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {row[0]: [int(cell) for cell in row[1:]] for row in cells if row[0] in SHAPES}


def test_both_pages_have_the_table() -> None:
    rows = _rows("docs/memory.md")
    assert list(rows) == list(SHAPES)
    some = _rows("README.md")
    assert some
    assert all(rows[model][: len(row)] == row for model, row in some.items())


@pytest.mark.experiment
@pytest.mark.parametrize("model", SHAPES)
def test_the_table_is_computed(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="a shape is a configuration of transformers")
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[model]))
    found: list[int] = []
    for section in SECTIONS:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "hytrain": section,
        }
        (tmp_path / "ds.json").write_text(json.dumps(config))
        # Masters are split on the CPU only where whole ones fit neither there nor on the GPU.
        gpu, host = (1.1 * found[0] + 3, 0.9 * found[-1]) if "master" in section else (2000, 4000)
        memory = ["--gpu-memory", str(gpu), "--host-memory", str(host), "--json"]
        code = main(["explain", str(tmp_path / "ds.json"), "--model", str(tmp_path), *memory])
        assert code == 0
        on_host = json.loads(capsys.readouterr().out)["candidates"][0]
        found = found or [round(on_host["gpu_bytes"] / 2**30)]
        found.append(round(on_host["host_bytes"] / 2**30))
    assert found == _rows("docs/memory.md")[model]


def _commands(page: str, beginning: str) -> list[tuple[list[str], str]]:
    """Arguments and the output shown of a page's commands that begin so."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^    \$ hytrain (.*(?:\n(?: {4}.*)?)*)", text, flags=re.MULTILINE)
    found = [re.split(r"(?<!\\)\n {4}", block, maxsplit=1) for block in blocks]
    return [
        (shlex.split(command.replace("\\\n", " ")), re.sub("^ {4}", "", output, flags=re.MULTILINE))
        for command, output in found
        if command.startswith(beginning)
    ]


@pytest.mark.parametrize(
    ("page", "beginning"),
    [
        ("docs/cli.md", "explain ds_config.json"),
        ("docs/cli.md", "plan --gpus"),
        ("docs/unequal_gpus.md", "plan --gpus"),
    ],
)
def test_outputs_are_what_the_commands_print(
    page: str,
    beginning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers", reason="a shape is a configuration of transformers")
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen3-4B", "Qwen3-8B"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(SHAPES[name]))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": zero}
    config |= {"train_micro_batch_size_per_gpu": "auto", "zero_force_ds_cpu_optimizer": False}
    Path("ds_config.json").write_text(json.dumps(config | {"hytrain": {"moments": "8bit"}}))
    ((arguments, shown),) = _commands(page, beginning)
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for part in shown.strip("\n").split("\n[...]"):
        assert part.strip("\n") in printed
