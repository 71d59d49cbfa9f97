"""The sizes of a model that nobody has built yet, from its transformers configuration.

The model is made on torch's meta device, where weights have shapes and no memory, and cut as
:mod:`hytrain.engine.build_optimizer` cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.errors import ConfigError
from hytrain.formats.moment_kinds import SPLIT
from hytrain.offload.slots import plan_slots
from hytrain.optimizer.model_cut import CutLayer, cut_model, live_bytes
from hytrain.placement.costs import LayerBytes
from hytrain.tools.explain.config import ModelSizes
from hytrain.tools.explain.training_form import TrainingForm
from hytrain.tools.profiler.language_model import build_language_model, hidden_size, read_config
from hytrain.zero3.plan import GatherSettings, gather_settings


def read_model_sizes(
    path: Path, config: HyTrainConfig, form: TrainingForm, *, num_ranks: int, rank: int
) -> ModelSizes:
    """The layers of a transformers ``config.json``'s model as one rank will hold them.

    Raises:
        ConfigError: the file is no transformers configuration, transformers is not installed, or
            the section does not fit the model or the ranks.
    """
    description = read_config(path)
    with torch.device("meta"):
        model = build_language_model(description, path).to(getattr(torch, form.dtype))
    trained = [p for p in model.parameters() if p.requires_grad]
    gathers: GatherSettings | None = gather_settings(form.gather_keys)
    if not form.shards_weights or (num_ranks == 1 and not form.weights_on_host):
        gathers = None
    cut = cut_model(model, {id(p): 0 for p in trained}, config, num_ranks, gathers)
    gradient_dtype: torch.dtype | None = None
    if form.gradient_dtype is not None:
        gradient_dtype = getattr(torch, form.gradient_dtype)
    layers: list[LayerBytes] = []
    gradient_bytes: list[int] = []
    outgoing_bytes: list[int] = []
    parts = [part for layer in cut for part in layer.trained]
    for part in parts:
        layout, (begin, end) = part.layout, part.shard(rank)
        itemsize = part.itemsize if gradient_dtype is None else gradient_dtype.itemsize
        sizes = end - begin, itemsize, part.itemsize
        layers.append(
            LayerBytes(
                layout.name,
                *sizes,
                keeps_pending=not form.is_direct,
                moments=config.moments,
                master=config.master,
            )
        )
        for span in layout.chunks(begin, end, config.offload.chunk_elements):
            gradient_bytes.append((span.end - span.begin) * itemsize)
            outgoing_bytes.append((span.end - span.begin) * span.dtype.itemsize)
    plan = plan_slots(
        gradient_bytes,
        outgoing_bytes,
        keeps_pending=not form.is_direct,
        fetches_copies=config.master == SPLIT and not form.weights_on_host,
    )
    on_gpu, on_host = _weights(model, cut, gathers, form, rank)
    return ModelSizes(
        source=str(path),
        layers=tuple(layers),
        parameters=tuple(part.layout.numel for part in parts),
        training_copy_bytes=on_gpu,
        staging_bytes=plan.staging_bytes + on_host,
        num_ranks=num_ranks,
        rank=rank,
        shards_weights=form.shards_weights,
        copies_bytes=plan.copy_bytes,
    )


def block_input_bytes(path: Path, form: TrainingForm, tokens: int) -> int:
    """What waits for a backward that computes all blocks again: their inputs, of so many tokens.

    Raises:
        ConfigError: the model does not say how wide it is, or of how many blocks.
    """
    description = read_config(path)
    hidden, blocks = hidden_size(description), getattr(description, "num_hidden_layers", None)
    if hidden is None or not isinstance(blocks, int):
        raise ConfigError(f"--model {path} gives no hidden_size or num_hidden_layers: omit --seq")
    return tokens * hidden * blocks * getattr(torch, form.dtype).itemsize


def _weights(
    model: nn.Module,
    cut: Sequence[CutLayer],
    gathers: GatherSettings | None,
    form: TrainingForm,
    rank: int,
) -> tuple[int, int]:
    """Bytes of weights, frozen ones too, on the GPU at the peak of a step, and on the host."""
    away = [part for layer in cut for part in layer.sharded]
    shards = sum(part.shard_bytes(rank) for part in away)
    whole = sum(_bytes([slot.parameter for slot in part.layout.slots]) for part in away)
    everything = _bytes([*model.parameters(), *model.buffers()])
    on_gpu = everything - whole + live_bytes(cut, gathers)
    return (on_gpu, shards) if form.weights_on_host else (on_gpu + shards, 0)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
