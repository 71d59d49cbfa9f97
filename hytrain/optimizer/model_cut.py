"""Cuts a model into layers: where each parameter is, which rank owns what, what is sharded.

Only numbers and names are computed: nothing is moved, and the model may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count, islice

from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.kernels.device_optimizer import DeviceOptimizer
from hytrain.model.discovery import LayerParameters, can_be_sharded, find_layers
from hytrain.model.layout import LayerLayout, lay_out
from hytrain.model.partition import deal, partition
from hytrain.model.sharded_storage import shard_bytes
from hytrain.placement.costs import PIECE
from hytrain.zero3.plan import GatherSettings, most_live, persistent_layers

MOST_ELEMENTS = 2**30
"""Of a block that is not cut. Its gradient is on the GPU twice, as autograd makes it and as it is
reduced: 4 GiB in bf16, a twentieth of 80 GiB. Blocks of a dense model of 70 B have 0.9 B
parameters, those of a mixture of experts of 30 B have 0.6 B: they stay whole."""


@dataclass(frozen=True, slots=True)
class CutPart:
    """The trained or the frozen weights of a layer.

    Attributes:
        layout: their flat space; its index counts parts of the same kind.
        sizes: elements that each rank owns.
        is_sharded: a rank keeps the training copy only of what it owns.
        optimizer: what updates them, if not Adam.
    """

    layout: LayerLayout
    sizes: list[int]
    is_sharded: bool
    optimizer: DeviceOptimizer | None = None

    def shard(self, rank: int) -> tuple[int, int]:
        """``[begin, end)`` of the flat space that a rank owns."""
        begin = sum(self.sizes[:rank])
        return begin, begin + self.sizes[rank]

    def shard_bytes(self, rank: int) -> int:
        """Bytes of the training copy of a rank's shard."""
        return shard_bytes(self.layout, self.shard(rank))

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the training copy, of the widest dtype if there are several."""
        return max(segment.dtype.itemsize for segment in self.layout.segments)


@dataclass(frozen=True, slots=True)
class CutLayer:
    """A layer: its trained weights, if any, in pieces, and its frozen ones, if they are sharded."""

    trained: tuple[CutPart, ...]
    frozen: CutPart | None

    @property
    def parts(self) -> list[CutPart]:
        return [*self.trained, *(() if self.frozen is None else (self.frozen,))]

    @property
    def sharded(self) -> list[CutPart]:
        """The parts that are gathered for a use of the layer."""
        return [part for part in self.parts if part.is_sharded]


def cut_model(
    model: nn.Module,
    group_of: Mapping[int, int],
    config: HyTrainConfig,
    num_ranks: int,
    gathers: GatherSettings | None,
    optimizers: Sequence[DeviceOptimizer | None] = (),
) -> list[CutLayer]:
    """A model's layers in forward order.

    Args:
        model: parameters need shapes, no memory.
        group_of: ``id(parameter)`` -> index of its parameter group, for the trained ones.
        config: how layers are found and shards are cut.
        num_ranks: ranks that share the weights.
        gathers: DeepSpeed's keys if weights are sharded (ZeRO-3); None: they are whole.
        optimizers: one for each parameter group; (): Adam for all.

    Raises:
        ConfigError: the section does not fit the model or the ranks.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if id(p) in group_of]
    frozen = [p for p in parameters if can_be_sharded(p)] if gathers is not None else []
    found = find_layers(model, trained, config.layers.block_class, frozen)
    by_parameter = {key: optimizers[group] for key, group in group_of.items()} if optimizers else {}
    pieces = [_pieces(layer, by_parameter) for layer in found]
    apart = [LayerParameters(each.name, each.frozen, each.block) for each in found if each.frozen]
    owners = _owners(list(chain(*pieces)), by_parameter, num_ranks, config.shard_fractions)
    layouts = lay_out(list(chain(*pieces)), group_of, num_ranks, owners)
    frozen_layouts = lay_out(apart, dict.fromkeys(map(id, frozen), 0), num_ranks)
    everything = [*layouts, *frozen_layouts]
    sizes = [layout.size for layout in everything]
    owned = partition(sizes, num_ranks, config.shard_fractions)
    whole = set(range(len(sizes))) if gathers is None else persistent_layers(sizes, gathers)
    if gathers is not None:
        # If a layer has pieces, all of them are gathered.
        whole -= set(compress(count(), (len(each) > 1 for each in pieces for _ in each)))
    parts = iter(
        CutPart(
            layout,
            [*layout.dealt] or owned[number],
            number not in whole,
            by_parameter.get(id(layout.slots[0].parameter)),
        )
        for number, layout in enumerate(everything)
    )
    trained_parts = [tuple(islice(parts, len(each))) for each in pieces]
    layers: list[CutLayer] = []
    for layer, its_trained in zip(found, trained_parts, strict=True):
        still = next(parts) if layer.frozen else None
        if still is not None and not still.is_sharded:
            still = None  # stays as the model has it
        layers.append(CutLayer(its_trained, still))
    return [layer for layer in layers if layer.parts]


def _owners(
    layers: Sequence[LayerParameters],
    optimizers: Mapping[int, DeviceOptimizer | None],
    num_ranks: int,
    fractions: Sequence[float] | None,
) -> dict[int, int]:
    """``id(parameter)`` -> its rank, for parameters whose optimizer takes whole matrices.

    Each matrix is thus made orthogonal once, and nothing is gathered for it.
    """
    whole: list[nn.Parameter] = []
    for layer in layers:
        kinds = ((parameter, optimizers.get(id(parameter))) for _, parameter in layer.parameters)
        whole += [p for p, kind in kinds if kind is not None and kind.whole_matrices]
    if num_ranks == 1:
        return {}
    dealt = deal([parameter.numel() for parameter in whole], num_ranks, fractions)
    return {id(parameter): owner for parameter, owner in zip(whole, dealt, strict=True)}


_Items = list[tuple[str, nn.Parameter]]


def _pieces(
    layer: LayerParameters, optimizers: Mapping[int, DeviceOptimizer | None]
) -> list[LayerParameters]:
    """Cuts a layer's trained parameters into pieces: one, or several if a block has very many.

    A piece has its own gradient, state and update, and moves by itself; a parameter is not cut.
    One gather brings all pieces: the block's modules report it as a whole. What another optimizer
    updates is a piece of its own.
    """
    kinds: dict[DeviceOptimizer | None, _Items] = {}
    for item in layer.parameters:
        kinds.setdefault(optimizers.get(id(item[1])), []).append(item)
    found = [
        items
        for kind in kinds.values()
        for items in ([kind] if layer.block is None else _of_size(kind))
    ]
    return [
        LayerParameters(f"{layer.name}{f'{PIECE}{number}' * (number > 1)}", items, layer.block)
        for number, items in enumerate(found, 1)
    ]


def _of_size(parameters: _Items) -> list[_Items]:
    if sum(p.numel() for _, p in parameters) <= MOST_ELEMENTS:
        return [parameters]
    # A block's norms get their gradients last: a large parameter in their piece would wait.
    alone = [[item] for item in parameters if item[1].numel() > MOST_ELEMENTS // 4]
    small: list[_Items] = []
    elements = 0
    for item in parameters:
        if item[1].numel() > MOST_ELEMENTS // 4:
            continue
        elements += item[1].numel()
        if not small or elements > MOST_ELEMENTS:
            small.append([])
            elements = item[1].numel()
        small[-1].append(item)
    return [*small, *alone]


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
