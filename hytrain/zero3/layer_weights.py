"""All weights of a layer, trained and frozen ones: what a pass gathers and gives up at once.

Updates, gradients, the norm and the placement know a layer's trained weights only (``LayerState``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from hytrain.model.layer_state import LayerState
from hytrain.model.layout import LayerLayout, ParameterSlot
from hytrain.model.partition import align_up, in_buckets, sizes_within
from hytrain.model.sharded_storage import ShardedStorage
from hytrain.offload.arena import Arena


@dataclass(frozen=True, slots=True)
class ShardedWeights:
    """Weights of which every rank keeps a shard.

    Attributes:
        storage: this rank's shard, and the whole while it is used.
        sizes: elements that each rank owns.
    """

    storage: ShardedStorage
    sizes: list[int]

    @property
    def layout(self) -> LayerLayout:
        """The layout of their flat space."""
        return self.storage.layout

    def allow_reads(self) -> None:
        """Adds a reader, so that they may be read: see ``WatchedParameters``."""
        if self.storage.reads is not None:
            self.storage.reads.allow()

    def disallow_reads(self) -> None:
        """Removes a reader."""
        if self.storage.reads is not None:
            self.storage.reads.disallow()

    def forbid_reads(self) -> None:
        """Removes all readers: reads are reported again."""
        if self.storage.reads is not None:
            self.storage.reads.disallow_all()

    def sizes_within(self, low: int, high: int) -> list[int]:
        """Elements of each rank's shard that are in ``[low, high)`` of the flat space."""
        return sizes_within(self.sizes, low, high)

    def buckets(self, limit: int) -> Iterator[tuple[list[ParameterSlot], int, int]]:
        """Yields parameters of one dtype, with their range ``[low, high)``.

        Together they have ``limit`` bytes at most; a larger parameter is alone. If all of a run is
        one bucket, the range is the run's, whose shards may be equal: gathers are faster then.
        """
        for low, high, flat in self.storage.runs:
            slots = [slot for slot in self.layout.slots if low <= slot.offset < high]
            size = flat.element_size()
            groups = in_buckets(slots, lambda slot, size=size: align_up(slot.numel) * size, limit)
            cuts = [low, *(group[0].offset for group in groups[1:]), high]
            for group, (begin, end) in zip(groups, pairwise(cuts), strict=True):
                yield group, begin, end


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights, in parts, each with a flat space of its own.

    Attributes:
        index: its number among gathered layers: the first trained part's; layers that are frozen as
            a whole have higher numbers.
        trained: the parts that the pipeline updates: one, or the pieces of a large block; () if all
            is frozen.
        frozen: the frozen part, if it is sharded (ZeRO-3). Frozen weights that are whole on every
            rank are in no layer: there is nothing to do for them.
    """

    index: int
    trained: tuple[LayerState, ...] = ()
    frozen: ShardedWeights | None = None

    @property
    def layouts(self) -> list[LayerLayout]:
        """The parts' flat spaces."""
        frozen = [] if self.frozen is None else [self.frozen.layout]
        return [*(state.layout for state in self.trained), *frozen]

    @property
    def name(self) -> str:
        """The block's name, or where the layer is."""
        return self.layouts[0].name

    @property
    def block(self) -> nn.Module | None:
        """The module whose forward uses them; None for what is before, between or after blocks."""
        return self.layouts[0].block

    @property
    def slots(self) -> list[ParameterSlot]:
        """All parameters, each with its place in its part's flat space."""
        return [slot for layout in self.layouts for slot in layout.slots]

    @property
    def resident(self) -> tuple[LayerState, ...]:
        """The trained parts, if every rank always has them whole; else (): all or none."""
        return () if any(state.storage.is_sharded for state in self.trained) else self.trained

    @property
    def sharded(self) -> list[ShardedWeights]:
        """The parts that are gathered for their uses."""
        parts = [
            ShardedWeights(state.storage, state.sizes)
            for state in self.trained
            if isinstance(state.storage, ShardedStorage)
        ]
        if self.frozen is not None:
            parts.append(self.frozen)
        return parts

    def parts(self, *, with_frozen: bool) -> list[ShardedWeights]:
        """The same as :attr:`sharded`; the frozen part only ``with_frozen``."""
        return [part for part in self.sharded if with_frozen or part is not self.frozen]

    @property
    def gathered_elements(self) -> int:
        """Elements that a gather brings; for a layer that is always whole, all its elements."""
        sharded = [part.layout for part in self.sharded]
        return sum(layout.size for layout in sharded or self.layouts)


@dataclass(frozen=True, slots=True)
class BuiltWeights:
    """The layers with their training copy in place and no optimizer state yet.

    Attributes:
        states: the trained parts, in forward order.
        layers: all weights, in forward order.
        home: host memory of shards that are kept there; closed with the layers.
        live_bytes: bytes of gathered layers at the peak of a step.
        largest_frozen: bytes of the largest frozen parameter that is whole on every rank.
    """

    states: list[LayerState]
    layers: list[LayerWeights]
    home: Arena | None
    live_bytes: int
    largest_frozen: int

    def close(self) -> None:
        """Gives memory back if nothing is built on the layers; sharded weights are lost with it.

        Explicitly: the error that ended the build keeps all its frames alive while it is handled.
        """
        for layer in self.layers:
            for state in layer.trained:
                state.release()
            if layer.frozen is not None:
                layer.frozen.storage.release()
        if self.home is not None:
            self.home.close()
