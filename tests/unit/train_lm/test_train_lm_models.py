"""Presets have the sizes that name them, and configs from disk build."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import torch
from transformers import PretrainedConfig


def _meta_parameter_count(config: PretrainedConfig) -> int:
    """Count the parameters that a config describes without allocating any of them."""
    model = models.build_model(
        config,
        device=torch.device("meta"),
        dtype=torch.bfloat16,
        seed=0,
        activation_checkpointing=False,
    )
    return models.count_parameters(model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3m", 3_426_560),
        ("llama-10m", 11_015_040),
        ("llama-100m", 100_449_920),
        ("llama-1b", 1_041_836_032),
        ("llama-3b", 2_914_667_520),
        ("llama-7b", 6_738_415_616),
        ("llama-10b", 9_843_819_520),
        ("llama-13b", 13_015_864_320),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_parameter_count(name: str, expected: int) -> None:
    config = models.model_config(name, seq_len=1024)
    assert _meta_parameter_count(config) == expected


def test_llama_count_is_the_formula() -> None:
    layers, hidden, feed_forward, vocab = 24, 3072, 8192, 32000
    block = 4 * hidden**2 + 3 * hidden * feed_forward + 2 * hidden
    expected = layers * block + 2 * vocab * hidden + hidden
    assert _meta_parameter_count(models.model_config("llama-3b", seq_len=8)) == expected
    assert models.flops_per_token(expected) == 6 * expected


def test_config_from_folder_and_from_file(tmp_path: Path) -> None:
    preset = models.model_config("llama-3m", seq_len=64)
    preset.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        config = models.model_config(str(path), seq_len=64)
        assert _meta_parameter_count(config) == 3_426_560
        assert config.use_cache is False


def test_unknown_model_names_the_presets() -> None:
    with pytest.raises(models.ModelError, match="llama-3b"):
        models.model_config("llama-4711b", seq_len=64)


@pytest.mark.parametrize("text", ["{", json.dumps({"hidden_size": 8}), '{"model_type": "nope"}'])
def test_unusable_config_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(models.ModelError, match="model_type"):
        models.model_config(str(path), seq_len=64)


def test_vocabulary_must_hold_the_tokenizer() -> None:
    with pytest.raises(models.ModelError, match="--vocab-size 1024"):
        models.model_config("llama-3m", seq_len=64, min_vocab=1000)
    config = models.model_config("llama-3m", seq_len=64, min_vocab=1000, vocab_size=1024)
    assert config.vocab_size == 1024


def test_positions_bound_the_sequence() -> None:
    with pytest.raises(models.ModelError, match="1024 positions"):
        models.model_config("gpt2", seq_len=2048)
    assert models.model_config("llama-3m", seq_len=9000).max_position_embeddings == 9000


def test_built_in_its_dtype_and_the_same_each_time() -> None:
    config = models.model_config("llama-3m", seq_len=64)

    def build(checkpointing: bool) -> torch.nn.Module:
        return models.build_model(
            config,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            seed=3,
            activation_checkpointing=checkpointing,
        )

    plain, recomputed = build(False), build(True)
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16}
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert _saved_bytes(recomputed) < _saved_bytes(plain) / 2


def _saved_bytes(model: torch.nn.Module) -> int:
    """Bytes that a forward pass keeps for backward, parameters left out."""
    saved = 0
    weights = {p.data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 0 if tensor.data_ptr() in weights else tensor.nbytes
        return tensor

    ids = torch.zeros(1, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids)
    return saved


def test_parameter_groups_hold_each_parameter_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    decayed, undecayed = models.parameter_groups(model)
    assert [p.dim() for p in decayed["params"]] == [2]
    assert "weight_decay" not in decayed
    assert [p.dim() for p in undecayed["params"]] == [1, 1, 1]
    assert undecayed["weight_decay"] == 0.0
