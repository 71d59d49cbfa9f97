"""Configurations of transformers, as files."""

from __future__ import annotations

import json
from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
}


def write_config(folder: Path, fields: object) -> Path:
    """Writes ``folder/config.json``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_llama(folder: Path) -> Path:
    """Writes the configuration of a tiny Llama; returns its folder."""
    return write_config(folder / "tiny-llama", LLAMA)
