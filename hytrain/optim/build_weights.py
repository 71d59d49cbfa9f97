"""Takes the model's weights into the storage of their stage, one layer at a time.

Under ZeRO-3 the model need not fit on a GPU: it stays where it was built (host, or partitioned
by ``deepspeed.zero.Init``), and no more than one layer is whole on the device at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hytrain._deepspeed import (
    assemble_partitioned,
    forget_partition,
    is_partitioned,
    shape_partitioned,
)
from hytrain.layers.layout import LayerLayout
from hytrain.layers.partition import PartitionTable
from hytrain.layers.sharded_storage import ShardedStorage, shard_bytes
from hytrain.layers.state import LayerState
from hytrain.layers.storage import ResidentStorage
from hytrain.offload.arena import Arena
from hytrain.parallel.collectives import ShardCollectives
from hytrain.parallel.gather_plan import GatherSettings, most_live, persistent_layers

_LINE = 64


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """Where the training copy is kept.

    Attributes:
        device: where it is computed with.
        gathers: DeepSpeed's keys of ZeRO-3; None below it: every rank has all of it.
        on_host: this rank's shards are kept in host memory (``offload_param``).
        gradient_dtype: dtype of gradients; None: each layer's own training copy's.
    """

    device: torch.device
    gathers: GatherSettings | None = None
    on_host: bool = False
    gradient_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class BuiltWeights:
    """The layers with their training copy in place and no optimizer state yet.

    Attributes:
        states: in forward order.
        home: host memory of shards that are kept there; whoever closes the layers closes it.
        live_bytes: of gathered layers at the peak of a step.
    """

    states: list[LayerState]
    home: Arena | None
    live_bytes: int


def give_shapes(model: nn.Module) -> None:
    """Parameters that zero.Init has partitioned get their shapes, without memory."""
    for parameter in model.parameters():
        if is_partitioned(parameter):
            empty = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            parameter.data = empty.expand(shape_partitioned(parameter))


def build_weights(
    model: nn.Module,
    layouts: Sequence[LayerLayout],
    table: PartitionTable,
    settings: WeightSettings,
    collectives: ShardCollectives,
) -> BuiltWeights:
    """Moves the weights; under ZeRO-3 a collective.

    Args:
        model: after :func:`give_shapes`.
        layouts: places of the trained parameters.
        table: who owns what.
        settings: see :class:`WeightSettings`.
        collectives: the ranks.

    Raises:
        MemoryError: host memory for shards cannot be had; no weight has been moved.
    """
    gathers, rank = settings.gathers, collectives.rank
    whole = set(range(len(layouts)))
    if gathers is not None and (collectives.world_size > 1 or settings.on_host):
        whole = persistent_layers([layout.size for layout in layouts], gathers)
    home: Arena | None = None
    if settings.on_host:
        sizes = [_home_bytes(table, x, rank) for x in layouts if x.index not in whole]
        home = Arena(sum(sizes), settings.device)
    states: list[LayerState] = []
    for layout in layouts:
        begin, end = table.shard(layout.index, rank)
        if gathers is not None:
            _bring([slot.parameter for slot in layout.slots], settings.device, collectives)
        storage: ResidentStorage | ShardedStorage
        if layout.index in whole:
            storage = ResidentStorage(layout, settings.device)
        else:
            memory = home and home.take_tensor(_home_bytes(table, layout, rank))
            storage = ShardedStorage(layout, (begin, end), settings.device, memory)
        states.append(
            LayerState(
                layout=layout,
                storage=storage,
                begin=begin,
                end=end,
                sizes=table.sizes(layout.index),
                placement="cpu",
                gradient_dtype=settings.gradient_dtype or _common_dtype(layout),
            )
        )
    if gathers is not None:
        trained = {id(slot.parameter) for layout in layouts for slot in layout.slots}
        for parameter in model.parameters():
            if id(parameter) not in trained:
                _bring([parameter], settings.device, collectives)
        model.to(settings.device)  # buffers
    return BuiltWeights(states, home, _live_bytes(layouts, whole, gathers))


def _live_bytes(
    layouts: Sequence[LayerLayout], whole: set[int], gathers: GatherSettings | None
) -> int:
    sharded = {layout.index for layout in layouts} - whole
    if gathers is None or not sharded:
        return 0
    itemsize = max(dtype.itemsize for layout in layouts for dtype, _, _ in layout.dtype_runs)
    return itemsize * most_live([layout.size for layout in layouts], sharded, gathers)


def _home_bytes(table: PartitionTable, layout: LayerLayout, rank: int) -> int:
    shard = table.shard(layout.index, rank)
    return -(-shard_bytes(layout, shard) // _LINE) * _LINE


def _bring(
    parameters: Sequence[nn.Parameter], device: torch.device, collectives: ShardCollectives
) -> None:
    """Whole weights on the device, those of rank 0 on all of them."""
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
    """The dtype of a layer's gradient buffer: the parameters', fp32 where they differ."""
    dtypes = {segment.dtype for segment in layout.segments}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32
