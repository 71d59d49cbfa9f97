"""A model's shape for the planner, from its transformers configuration."""

from __future__ import annotations

from pathlib import Path

from hytrain.config import HyTrainConfig
from hytrain.errors import ConfigError
from hytrain.formats.dtypes import ITEMSIZE, TORCH_NAMES, Dtype
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.profile_file import ProfiledModel
from hytrain.formats.record import parse_json
from hytrain.tools.explain.training_form import TrainingForm
from hytrain.tools.planner.device_sheets import ModelShape
from hytrain.tools.profiler.model_sizes import read_model_sizes

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


def read_model_shape(
    path: Path, *, seq_len: int, dtype: Dtype, moments: MomentsName = FP32
) -> ModelShape:
    """The model as equal blocks and what is outside of them.

    Args:
        path: a transformers ``config.json``, or the folder that holds one.
        seq_len: tokens of a sample.
        dtype: of the training copy.
        moments: how Adam's are kept.

    Raises:
        ConfigError: the file is no transformers configuration, or tells no sizes.
    """
    form = TrainingForm(TORCH_NAMES[dtype], None, 1.0, True, 1)
    sizes = read_model_sizes(path, HyTrainConfig(), form, num_ranks=1, rank=0)
    names = [layer.name for layer in sizes.layers]
    is_block = [not name.startswith(("before ", "after ")) for name in names]
    blocks = [size for size, block in zip(sizes.parameters, is_block, strict=True) if block]
    if not blocks:
        raise ConfigError(f"--model {path} has no stack of blocks: nothing can be planned for it")
    first = is_block.index(True)
    each = sum(blocks) // len(blocks)
    before = sum(sizes.parameters[:first])
    file = path / "config.json" if path.is_dir() else path
    config = parse_json(file.read_bytes(), f"--model {file}", ConfigError)
    hidden = next((config[key] for key in _HIDDEN if isinstance(config.get(key), int)), None)
    vocabulary = config.get("vocab_size")
    if hidden is None or not isinstance(vocabulary, int):
        raise ConfigError(
            f"--model {path} gives no vocab_size, or none of {', '.join(_HIDDEN)}: profile the "
            "model instead"
        )
    model = ProfiledModel(
        name=(path.parent if path.name == "config.json" else path).resolve().name,
        num_layers=len(blocks),
        layer_parameters=each,
        outside_parameters=(before, sum(sizes.parameters) - before - each * len(blocks)),
        seq_len=seq_len,
        dtype=dtype,
        boundary_bytes=ITEMSIZE[dtype] * seq_len * hidden,
        moments=moments,
    )
    return ModelShape(model, hidden, vocabulary)
