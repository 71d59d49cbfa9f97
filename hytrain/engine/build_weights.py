"""Moves the model's weights to the storage of the ZeRO stage, one layer at a time.

Under ZeRO-3 the model need not fit on a GPU: it stays where it was built (host, or partitioned
by ``deepspeed.zero.Init``), and no more than one part of a layer is whole on the device at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from hytrain.comm.collectives import ShardCollectives
from hytrain.engine.build import BuildSettings
from hytrain.engine.deepspeed_internals import (
    assemble_partitioned,
    forget_partition,
    is_partitioned,
    shape_partitioned,
)
from hytrain.kernels.host_memory import PAGE
from hytrain.model.layer_state import LayerState
from hytrain.model.layer_update import LayerUpdate
from hytrain.model.layout import LayerLayout
from hytrain.model.sharded_storage import ShardedStorage
from hytrain.model.state_format import StateFormat
from hytrain.model.storage import ResidentStorage
from hytrain.offload.arena import Arena
from hytrain.optimizer.model_cut import CutLayer, CutPart, live_bytes, parts_of
from hytrain.zero3.layer_weights import BuiltWeights, LayerWeights, ShardedWeights


def give_shapes(model: nn.Module) -> None:
    """Gives parameters that ``zero.Init`` has partitioned their shapes, without memory."""
    for parameter in model.parameters():
        if is_partitioned(parameter):
            empty = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = empty.expand(shape_partitioned(parameter))


def build_weights(
    model: nn.Module,
    cut: Sequence[CutLayer],
    collectives: ShardCollectives,
    settings: BuildSettings,
) -> BuiltWeights:
    """Moves the weights of a model that was given its shapes; under ZeRO-3 a collective.

    Raises:
        HostMemoryError: there is not enough host memory for shards; no weight has been moved.
    """
    rank, device, is_zero3 = collectives.rank, settings.device, settings.gathers is not None
    home: Arena | None = None
    if settings.on_host:
        sizes = [_home_bytes(part, rank) for part in parts_of(cut) if part.is_sharded]
        home = Arena(
            sum(sizes),
            device,
            purpose="this rank's shards of the weights",
            remedy='use more ranks, or remove "zero_optimization.offload_param"',
            as_taken=True,  # the model gives its memory back layer by layer meanwhile
        )
    num_trained = sum(len(layer.trained) for layer in cut)
    beyond = itertools.count(num_trained)
    layers: list[LayerWeights] = []
    placed: set[int] = set()
    for layer in cut:
        trained: list[LayerState] = []
        frozen: ShardedWeights | None = None
        for part in layer.parts:
            parameters = [slot.parameter for slot in part.layout.slots]
            placed.update(map(id, parameters))
            if is_zero3:
                _bring(parameters, device, collectives)
            storage = _make_storage(part, device, home, rank)
            if part is layer.frozen:
                assert isinstance(storage, ShardedStorage)
                frozen = ShardedWeights(storage, part.sizes)
            else:
                trained.append(_make_state(part, storage, rank, settings.gradient_dtype))
        index = trained[0].index if trained else next(beyond)
        layers.append(LayerWeights(index, tuple(trained), frozen))
    others = [parameter for parameter in model.parameters() if id(parameter) not in placed]
    if is_zero3:
        for parameter in others:
            _bring([parameter], device, collectives)
        model.to(device)  # buffers
    states = [state for layer in layers for state in layer.trained]
    largest_frozen = max((x.nbytes for x in others), default=0)
    return BuiltWeights(states, layers, home, live_bytes(cut, settings.gathers), largest_frozen)


def _make_storage(
    part: CutPart, device: torch.device, home: Arena | None, rank: int
) -> ResidentStorage | ShardedStorage:
    if not part.is_sharded:
        return ResidentStorage(part.layout, device)
    memory = home and home.take_tensor(_home_bytes(part, rank))
    return ShardedStorage(part.layout, part.shard(rank), device, memory)


def _make_state(
    part: CutPart,
    storage: ResidentStorage | ShardedStorage,
    rank: int,
    gradient_dtype: torch.dtype | None,
) -> LayerState:
    begin, end = part.shard(rank)
    return LayerState(
        layout=part.layout,
        storage=storage,
        begin=begin,
        end=end,
        sizes=part.sizes,
        placement="cpu",
        gradient_dtype=gradient_dtype or _common_dtype(part.layout),
        form=StateFormat(optimizer=part.optimizer),
        update=LayerUpdate(updated_by="cpu" if part.optimizer is None else "gpu"),
    )


def _home_bytes(part: CutPart, rank: int) -> int:
    return -(-part.shard_bytes(rank) // PAGE) * PAGE


def _bring(
    parameters: Sequence[nn.Parameter], device: torch.device, collectives: ShardCollectives
) -> None:
    """Brings whole weights to the device: rank 0's, on all ranks."""
    partitioned = [parameter for parameter in parameters if is_partitioned(parameter)]
    dtypes = [parameter.dtype for parameter in partitioned]
    if partitioned:
        assemble_partitioned(partitioned)
    for parameter, dtype in zip(partitioned, dtypes, strict=True):
        forget_partition(parameter)
        parameter.data = parameter.data.to(device, dtype)
    known = {id(parameter) for parameter in partitioned}
    for parameter in parameters:
        if id(parameter) not in known:
            parameter.data = parameter.data.to(device)
            collectives.broadcast_from_first(parameter.data)


def _common_dtype(layout: LayerLayout) -> torch.dtype:
    """Returns the dtype of a layer's gradient buffer: the parameters', or fp32 if they differ."""
    dtypes = {segment.dtype for segment in layout.segments}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
