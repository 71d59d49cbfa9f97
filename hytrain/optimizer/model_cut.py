"""Cuts a model: its layers, where each parameter is, who owns what, and what is sharded.

Numbers and names only: nothing is moved, and the model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.model.discovery import LayerParameters, can_be_sharded, find_layers
from hytrain.model.layout import LayerLayout, lay_out
from hytrain.model.partition import partition
from hytrain.model.sharded_storage import shard_bytes
from hytrain.zero3.plan import GatherSettings, most_live, persistent_layers


@dataclass(frozen=True, slots=True)
class CutPart:
    """The trained or the frozen weights of a layer.

    Attributes:
        layout: their flat space; its index counts parts of the same kind.
        sizes: elements that each rank owns.
        is_sharded: a rank keeps the training copy of what it owns only.
    """

    layout: LayerLayout
    sizes: list[int]
    is_sharded: bool

    def shard(self, rank: int) -> tuple[int, int]:
        """``[begin, end)`` of the flat space that a rank owns."""
        begin = sum(self.sizes[:rank])
        return begin, begin + self.sizes[rank]

    def shard_bytes(self, rank: int) -> int:
        """Bytes of the training copy of a rank's shard."""
        return shard_bytes(self.layout, self.shard(rank))

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the training copy, of the widest dtype where there are several."""
        return max(segment.dtype.itemsize for segment in self.layout.segments)


@dataclass(frozen=True, slots=True)
class CutLayer:
    """A layer: its trained weights, if any, and its frozen ones, if they are sharded."""

    trained: CutPart | None
    frozen: CutPart | None

    @property
    def parts(self) -> list[CutPart]:
        return [part for part in (self.trained, self.frozen) if part is not None]

    @property
    def sharded(self) -> list[CutPart]:
        """What is gathered for a use of the layer."""
        return [part for part in self.parts if part.is_sharded]


def cut_model(
    model: nn.Module,
    group_of: Mapping[int, int],
    config: HyTrainConfig,
    num_ranks: int,
    gathers: GatherSettings | None,
) -> list[CutLayer]:
    """A model's layers in forward order.

    Args:
        model: parameters need shapes, no memory.
        group_of: ``id(parameter)`` -> index of its parameter group, for the trained ones.
        config: how layers are found and shards are cut.
        num_ranks: ranks that share the weights.
        gathers: DeepSpeed's keys where weights are sharded (ZeRO-3); None: they are whole.

    Raises:
        ConfigError: the section does not fit the model or the ranks.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if id(p) in group_of]
    frozen = [p for p in parameters if can_be_sharded(p)] if gathers is not None else []
    found = find_layers(model, trained, config.layers.block_class, frozen)
    apart = [LayerParameters(each.name, each.frozen, each.block) for each in found]
    layouts = _lay_out_some(found, group_of, num_ranks)
    frozen_layouts = _lay_out_some(apart, dict.fromkeys(map(id, frozen), 0), num_ranks)
    everything = [layout for layout in (*layouts, *frozen_layouts) if layout is not None]
    sizes = [layout.size for layout in everything]
    table = partition(sizes, num_ranks, config.shard_fractions)
    whole = set(range(len(sizes))) if gathers is None else persistent_layers(sizes, gathers)
    parts = {
        id(layout): CutPart(layout, table.sizes(number), number not in whole)
        for number, layout in enumerate(everything)
    }
    layers: list[CutLayer] = []
    for layout, frozen_layout in zip(layouts, frozen_layouts, strict=True):
        still = None if frozen_layout is None else parts[id(frozen_layout)]
        if still is not None and not still.is_sharded:
            still = None  # stays as the model has it
        layers.append(CutLayer(None if layout is None else parts[id(layout)], still))
    return [layer for layer in layers if layer.parts]


def live_bytes(layers: Sequence[CutLayer], gathers: GatherSettings | None) -> int:
    """Bytes of gathered layers at the peak of a step whose layers are used in their order."""
    sharded = [index for index, layer in enumerate(layers) if layer.sharded]
    if gathers is None or not sharded:
        return 0
    sizes = [sum(part.layout.size for part in layer.sharded or layer.parts) for layer in layers]
    itemsize = max(part.itemsize for layer in layers for part in layer.sharded)
    return itemsize * most_live(sizes, sharded, gathers)


def parts_of(layers: Iterable[CutLayer]) -> list[CutPart]:
    """The parts of all layers."""
    return [part for layer in layers for part in layer.parts]


def _lay_out_some(
    layers: Sequence[LayerParameters], group_of: Mapping[int, int], num_ranks: int
) -> list[LayerLayout | None]:
    """A layout for each layer that has parameters."""
    layouts = iter(lay_out([x for x in layers if x.parameters], group_of, num_ranks))
    return [next(layouts) if layer.parameters else None for layer in layers]
