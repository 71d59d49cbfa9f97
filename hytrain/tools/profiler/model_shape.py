"""A model's shape for the planner, from its transformers configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from hytrain.errors import ConfigError
from hytrain.formats.dtypes import ITEMSIZE, TORCH_NAMES, Dtype
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.tools.planner.device_sheets import ModelShape
from hytrain.tools.profiler.language_model import read_config
from hytrain.tools.profiler.measured_model import read_subject

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


def read_model_shape(
    path: Path, *, seq_len: int, dtype: Dtype, moments: MomentsName = FP32
) -> ModelShape:
    """The model of a transformers ``config.json`` as equal blocks and what is outside of them.

    Raises:
        ConfigError: the file is no transformers configuration, or tells no sizes.
    """
    config = read_config(path)
    hidden = next((getattr(config, key, None) for key in _HIDDEN if hasattr(config, key)), None)
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(hidden, int) or not isinstance(vocabulary, int):
        raise ConfigError(
            f"--model {path} gives no vocab_size, or none of {', '.join(_HIDDEN)}: profile the "
            "model instead"
        )
    subject = read_subject(str(path), seq_len=seq_len, dtype=getattr(torch, TORCH_NAMES[dtype]))
    known = {"boundary_bytes": ITEMSIZE[dtype] * seq_len * hidden, "moments": moments}
    return ModelShape(subject.sizes().model_copy(update=known), hidden, vocabulary)
