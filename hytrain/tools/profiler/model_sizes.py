"""The sizes of a model that has not been built, from its transformers configuration.

The model is made on torch's meta device, where weights have shapes and no memory, and cut as
:mod:`hytrain.engine.build_optimizer` cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.engine.deepspeed_internals import mark_matrices
from hytrain.errors import ConfigError
from hytrain.kernels.device_optimizer import DeviceOptimizer
from hytrain.kernels.muon import MUON
from hytrain.model.layer_state import LayerState
from hytrain.model.state_format import StateFormat
from hytrain.offload.cpu_updater import CpuSettings
from hytrain.optimizer.model_cut import CutLayer, CutPart, cut_model, live_bytes
from hytrain.placement.first_decision import state_sizes
from hytrain.tools.explain.model_report import ModelSizes
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
    group_of = {id(p): 0 for p in model.parameters() if p.requires_grad}
    optimizers: tuple[DeviceOptimizer | None, ...] = ()
    if form.is_muon:
        mark_matrices(model)
        group_of = {
            id(p): int(vars(p)["use_muon"]) for p in model.parameters() if id(p) in group_of
        }
        optimizers = None, MUON
    gathers: GatherSettings | None = gather_settings(form.gather_keys)
    if not form.shards_weights or (num_ranks == 1 and not form.weights_on_host):
        gathers = None
    cut = cut_model(model, group_of, config, num_ranks, gathers, optimizers)
    parts = [part for layer in cut for part in layer.trained]
    states = [_without_memory(part, config, form, rank) for part in parts]
    state = state_sizes(
        states,
        config,
        CpuSettings(1, config.offload.chunk_elements, direct=form.is_direct),
        largest_parameter=max(slot.numel for part in parts for slot in part.layout.slots),
        rank=rank,
        num_ranks=num_ranks,
        shards_weights=any(layer.sharded for layer in cut),
        stage=form.stage,
        micro_batches=config.micro_batches(rank, stage=form.stage, accumulation=form.accumulation),
    )
    on_gpu, on_host = _weights(model, cut, gathers, form, rank)
    return ModelSizes(
        source=str(path),
        state=replace(state, staging_bytes=state.staging_bytes + on_host),
        parameters=tuple(part.layout.numel for part in parts),
        training_copy_bytes=on_gpu,
        host_weights=on_host,
    )


def _without_memory(
    part: CutPart, config: HyTrainConfig, form: TrainingForm, rank: int
) -> LayerState:
    """A rank's shard of a layer, with sizes only."""
    begin, end = part.shard(rank)
    widest = max((s.dtype for s in part.layout.segments), key=lambda dtype: dtype.itemsize)
    dtype = widest if form.gradient_dtype is None else getattr(torch, form.gradient_dtype)
    storage: Any = SimpleNamespace(on_host=form.weights_on_host and part.is_sharded)
    kept = StateFormat(config.moments, config.moments_seed, config.master).of(part.optimizer)
    return LayerState(part.layout, storage, begin, end, part.sizes, "cpu", dtype, form=kept)


def block_input_bytes(path: Path, form: TrainingForm, tokens: int) -> int:
    """Bytes of all blocks' inputs for ``tokens``, which wait for a backward that recomputes blocks.

    Raises:
        ConfigError: the model's configuration gives no width or no number of blocks.
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
