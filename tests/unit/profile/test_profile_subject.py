"""The model that is profiled: read from where, counted how, refused why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import GPT2, LLAMA, write_config
from support.frozen import lora
from torch import nn

from hytrain.errors import ConfigError
from hytrain.tools.profiler.language_model import build_language_model, read_config
from hytrain.tools.profiler.measured_model import MeasuredModel, read_subject

CPU = torch.device("cpu")


def read(path: object, seq_len: int = 16) -> MeasuredModel:
    return read_subject(str(path), seq_len=seq_len, dtype=torch.float32)


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "tied gpt2"])
def test_sizes_are_those_of_the_whole_model(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = write_config(tmp_path / "some-model", fields)
    subject = read(folder)
    whole = build_language_model(read_config(folder), folder)
    sizes = subject.sizes()
    assert subject.name == read(folder / "config.json").name == "some-model"
    assert sizes.num_layers == 4
    total = sum(p.numel() for p in whole.parameters())
    assert 4 * sizes.layer_parameters + sum(sizes.outside_parameters) == total
    assert sizes.outside_parameters[0] >= 64 * 32  # the embedding


@pytest.mark.parametrize("fields", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_copy_is_the_same_model_with_fewer_layers(tmp_path: Path, fields: dict[str, Any]) -> None:
    copy = read(write_config(tmp_path / "model", fields)).copy(3, CPU)
    assert len(copy.blocks) == 3
    assert copy.model.training
    batch = copy.make_batch(2)
    assert batch["input_ids"].shape == (2, 16)
    copy.loss(batch).backward()
    assert all(p.grad is not None for p in copy.model.parameters())


def test_kinds_of_layers_go_round(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    fields = LLAMA | {
        "model_type": "qwen2",
        "num_hidden_layers": 2,
        "layer_types": kinds,
        "use_sliding_window": True,
        "sliding_window": 8,
    }
    copy = read(write_config(tmp_path / "model", fields)).copy(3, CPU)
    assert copy.model.config.layer_types == [*kinds, kinds[0]]
    assert len(copy.blocks) == 3


FUNCTION = """
import torch
from torch import nn

def build(num_layers, seq_len):
    model = nn.Sequential(*(nn.Linear(seq_len, seq_len) for _ in range(num_layers or 9)))
    return model, lambda size: {"input": torch.ones(size, seq_len)}

def with_defaults(num_layers=None, seq_len=1, *, other=None):
    return build(num_layers, seq_len)

def of_one(num_layers):
    pass

fixed = 3
"""


def test_a_function_of_a_file_or_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my_models_of_a_test.py"
    path.write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    for model in (f"{path}:build", f"{path}:with_defaults", "my_models_of_a_test:build"):
        assert read(model).sizes().num_layers == 9


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("{}:none", "no such function"),
        ("{}:fixed", "no such function"),
        ("{}:of_one", r"cannot be called with \(num_layers, seq_len\)"),
        ("nowhere.py:build", "cannot be imported"),
        ("no_such_module_at_all:build", "cannot be imported"),
        ("nowhere", "cannot read --model nowhere"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, model: str, words: str) -> None:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTION)
    with pytest.raises(ConfigError, match=words):
        read(model.format(path))


def test_more_tokens_than_the_model_takes(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", LLAMA)
    assert read(folder, 64).seq_len == 64
    with pytest.raises(ConfigError, match=r"--seq-len 65: .* max_position_embeddings 64"):
        read(folder, 65)


def test_a_model_of_two_stacks_is_refused(tmp_path: Path) -> None:
    fields = {"model_type": "t5", "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4}
    subject = read(write_config(tmp_path / "model", fields | {"vocab_size": 64, "num_layers": 4}))
    with pytest.raises(ConfigError, match=r"with 3 layers has \d+ blocks: .* --block-class"):
        subject.copy(3, CPU)


def test_warns_of_blocks_that_differ(caplog: pytest.LogCaptureFixture) -> None:
    def build(num_layers: int | None, seq_len: int) -> Any:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6))
        return model, lambda size: {"input": torch.ones(size, 4)}

    sizes = MeasuredModel("uneven", build, seq_len=1).sizes()
    assert sizes.layer_parameters == round((20 + 20 + 30) / 3)
    assert "blocks of uneven have 20 to 30 parameters" in caplog.text


def test_weights_that_are_not_trained_are_counted_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_config(tmp_path / "model", LLAMA)
    whole = read(folder).sizes()

    def build(num_layers: int | None, seq_len: int) -> Any:
        config = read_config(folder)
        config.num_hidden_layers = num_layers or config.num_hidden_layers
        model = build_language_model(config, folder)
        lora(model)
        return model, lambda size: {"input_ids": torch.ones(size, seq_len, dtype=torch.long)}

    subject = MeasuredModel("adapted", build, seq_len=1)
    sizes = subject.sizes()
    model, _ = build(None, 1)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes.num_layers == whole.num_layers
    assert sizes.layer_parameters == trained // whole.num_layers
    assert sizes.outside_parameters == (0, 0)
    assert sizes.frozen_layer_parameters == whole.layer_parameters
    assert sizes.frozen_outside_parameters == whole.outside_parameters
    assert sizes.frozen_block_parameters == 0
    assert len(subject.copy(2, CPU).blocks) == 2
    assert not caplog.records


class Parts(nn.Module):
    """Something before five blocks, and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.head = nn.Linear(4, 2)


def test_warns_of_what_a_plan_does_not_know_of_frozen_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def build(num_layers: int | None, seq_len: int) -> Any:
        model = Parts()
        for layer in (*model.blocks[:3], model.head):
            layer.requires_grad_(False)
        model.blocks[4].get_parameter("weight").requires_grad_(False)
        packed = torch.ones(1 << 20, dtype=torch.uint8)
        model.head.register_parameter("packed", nn.Parameter(packed, requires_grad=False))
        return model, dict

    sizes = MeasuredModel("upper", build, seq_len=1).sizes()
    assert (sizes.num_layers, sizes.layer_parameters, sizes.outside_parameters) == (2, 12, (20, 0))
    assert (sizes.frozen_layer_parameters, sizes.frozen_outside_parameters) == (8, (0, 10))
    assert sizes.frozen_block_parameters == 60
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0].startswith("blocks of upper have 4 to 20 parameters: a plan treats")
    assert texts[1].startswith("blocks of upper have 0 to 16 parameters that are not trained: a")
    assert texts[2].startswith("3 of 5 blocks of upper train nothing")
    assert "upper has 0.00 GiB of weights that are neither trained nor floating" in texts[3]
    assert len(texts) == 4


def test_a_model_that_reads_values_cannot_be_counted() -> None:
    def build(num_layers: int | None, seq_len: int) -> Any:
        return nn.Linear(int(torch.ones(1).item()), 4), dict

    with pytest.raises(ConfigError, match="cannot be made on the meta device"):
        MeasuredModel("reads", build, seq_len=1).sizes()
