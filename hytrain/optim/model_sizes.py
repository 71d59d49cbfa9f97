"""The sizes of a model that nobody has built yet, from its transformers configuration.

The model is made on torch's meta device, where weights have shapes and no memory, and cut as
:mod:`hytrain.optim.build` cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.errors import ConfigError
from hytrain.layers.discovery import find_layers
from hytrain.layers.language_model import build_language_model, read_config
from hytrain.layers.layout import LayerLayout, lay_out
from hytrain.layers.partition import PartitionTable, partition
from hytrain.layers.sharded_storage import shard_bytes
from hytrain.offload.slots import plan_slots
from hytrain.parallel.gather_plan import gather_settings, most_live, persistent_layers
from hytrain.placement.costs import LayerBytes
from hytrain.placement.outlook import ModelSizes
from hytrain.placement.training_form import TrainingForm


def read_model_sizes(
    path: Path, config: HyTrainConfig, form: TrainingForm, *, num_ranks: int, rank: int
) -> ModelSizes:
    """The layers of a model as one rank will hold them.

    Args:
        path: a transformers ``config.json``, or the folder that holds one.
        config: how the model is cut.
        form: dtypes, and whether gradients wait.
        num_ranks: ranks that share the state.
        rank: whose shards.

    Raises:
        ConfigError: the file is no transformers configuration, transformers is not installed, or
            the section does not fit the model or the ranks.
    """
    if rank >= num_ranks:
        raise ConfigError(f"--rank {rank} of --ranks {num_ranks}: ranks count from 0")
    description = read_config(path)
    with torch.device("meta"):
        model = build_language_model(description, path).to(getattr(torch, form.dtype))
    trained = [p for p in model.parameters() if p.requires_grad]
    found = find_layers(model, trained, config.layers.block_class)
    layouts = lay_out(found, {id(p): 0 for p in trained}, num_ranks)
    table = partition([layout.size for layout in layouts], num_ranks, config.shard_fractions)
    gradient_dtype: torch.dtype | None = None
    if form.gradient_dtype is not None:
        gradient_dtype = getattr(torch, form.gradient_dtype)
    layers: list[LayerBytes] = []
    gradient_bytes: list[int] = []
    outgoing_bytes: list[int] = []
    for layout in layouts:
        begin, end = table.shard(layout.index, rank)
        weights_dtype = _widest(layout)
        itemsize = (gradient_dtype or weights_dtype).itemsize
        sizes = end - begin, itemsize, weights_dtype.itemsize
        layers.append(LayerBytes(layout.name, *sizes, keeps_pending=not form.is_direct))
        for span in layout.chunks(begin, end, config.offload.chunk_elements):
            gradient_bytes.append((span.end - span.begin) * itemsize)
            outgoing_bytes.append((span.end - span.begin) * span.dtype.itemsize)
    plan = plan_slots(gradient_bytes, outgoing_bytes, keeps_pending=not form.is_direct)
    on_gpu, on_host = _weights(model, layouts, table, form, rank)
    return ModelSizes(
        source=str(path),
        layers=tuple(layers),
        parameters=tuple(layout.numel for layout in layouts),
        training_copy_bytes=on_gpu,
        staging_bytes=plan.staging_bytes + on_host,
        num_ranks=num_ranks,
        rank=rank,
        shards_weights=form.shards_weights,
    )


def _weights(
    model: nn.Module,
    layouts: Sequence[LayerLayout],
    table: PartitionTable,
    form: TrainingForm,
    rank: int,
) -> tuple[int, int]:
    """Bytes of weights on the GPU, at the peak of a step, and on the host."""
    everything = _bytes([*model.parameters(), *model.buffers()])
    num_ranks = len(table.cuts[0]) - 1
    if not form.shards_weights or (num_ranks == 1 and not form.weights_on_host):
        return everything, 0
    settings = gather_settings(form.gather_keys)
    sizes = [layout.size for layout in layouts]
    sharded = set(range(len(layouts))) - persistent_layers(sizes, settings)
    away = [layout for layout in layouts if layout.index in sharded]
    shards = sum(shard_bytes(layout, table.shard(layout.index, rank)) for layout in away)
    whole = sum(_bytes([slot.parameter for slot in layout.slots]) for layout in away)
    itemsize = max(_widest(layout).itemsize for layout in layouts)
    live = itemsize * most_live(sizes, sharded, settings)
    on_gpu = everything - whole + live
    return (on_gpu, shards) if form.weights_on_host else (on_gpu + shards, 0)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _widest(layout: LayerLayout) -> torch.dtype:
    return max((segment.dtype for segment in layout.segments), key=lambda dtype: dtype.itemsize)
