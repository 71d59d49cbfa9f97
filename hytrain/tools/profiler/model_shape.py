"""A model's shape for the planner, from its transformers configuration."""

from __future__ import annotations

from pathlib import Path

import torch

from hytrain.errors import ConfigError
from hytrain.formats.dtypes import ITEMSIZE, TORCH_NAMES, Dtype
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.tools.planner.device_sheets import ModelShape
from hytrain.tools.profiler.language_model import HIDDEN, hidden_size, read_config
from hytrain.tools.profiler.measured_model import read_subject


def read_model_shape(
    path: Path, *, seq_len: int, dtype: Dtype, moments: MomentsName = FP32
) -> ModelShape:
    """The model of a transformers ``config.json`` as equal blocks and what is outside of them.

    Raises:
        ConfigError: the file is no transformers configuration, or tells no sizes.
    """
    config = read_config(path)
    hidden = hidden_size(config)
    vocabulary = getattr(config, "vocab_size", None)
    if hidden is None or not isinstance(vocabulary, int):
        raise ConfigError(
            f"--model {path} gives no vocab_size, or none of {', '.join(HIDDEN)}: profile the "
            "model instead"
        )
    subject = read_subject(str(path), seq_len=seq_len, dtype=getattr(torch, TORCH_NAMES[dtype]))
    known = {"boundary_bytes": ITEMSIZE[dtype] * seq_len * hidden, "moments": moments}
    return ModelShape(subject.sizes().model_copy(update=known), hidden, vocabulary)
