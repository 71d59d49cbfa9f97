"""The training copy as the optimizer sees it: made ready for a pass, wherever it is kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.offload.arena import Arena
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.zero3.gatherer import LayerGatherer
from hytrain.zero3.layer_weights import LayerWeights, ShardedWeights
from hytrain.zero3.plan import GatherSettings
from hytrain.zero3.schedule import GatherSchedule, PassKind

BUCKET_BYTES = 512 << 20
"""Bytes of sharded weights that are gathered at a time for a reader outside of passes."""


class Bucket(NamedTuple):
    """Whole parameters, ``id(parameter)`` -> tensor, which are there after ``arrived``."""

    tensors: dict[int, torch.Tensor]
    arrived: torch.cuda.Event | None


class WeightPasses:
    """Forward and backward passes over layers some of which have to be gathered (ZeRO-3).

    Without any such layer its methods do nothing.
    """

    def __init__(
        self,
        pipeline: UpdatePipeline,
        layers: Sequence[LayerWeights],
        collectives: ShardCollectives,
        settings: GatherSettings | None,
        held: Sequence[int],
        home: Arena | None = None,
    ) -> None:
        """``held``: layers that no module of their own uses; ``home``: host memory of the shards;
        ``settings``: DeepSpeed's keys, None below ZeRO-3.
        """
        self._home = home
        self._closing: list[Callable[[], None]] = []
        self._moving: list[Callable[[], None]] = []
        self._pipeline = pipeline
        self.layers = list(layers)
        """All layers, in forward order."""
        self.gatherer = LayerGatherer(pipeline, collectives)
        self.is_sharded = any(layer.sharded for layer in layers)
        self.schedule: GatherSchedule | None = None
        if self.is_sharded and settings is not None:
            self.schedule = GatherSchedule(layers, self.gatherer, settings, collectives, held)
        self.active = self.schedule
        """Gathers layers as passes use them; None if none has to be gathered, or if suspended."""
        self.has_held = False
        """Whether a read outside of modules has made a layer stay through all passes."""
        self.when_held: Callable[[], None] = lambda: None
        """Called at each such read."""

    def begin(self, kind: PassKind) -> None:
        """Begins a pass; see :meth:`GatherSchedule.begin`."""
        if self.active is not None:
            self.active.begin(kind)

    def end(self) -> None:
        """Ends the pass; see :meth:`GatherSchedule.end`."""
        if self.active is not None:
            self.active.end()

    def give_up(self) -> None:
        """Gives up a pass that ended with an exception; see :meth:`GatherSchedule.give_up`."""
        if self.active is not None:
            self.active.give_up()

    @property
    def is_suspended(self) -> bool:
        """Whether modules' hooks gather nothing, since the user has removed them for now."""
        return self.active is not self.schedule

    def forbid_reads(self) -> None:
        """When a pass begins, has reads of layers reported that are not by their modules."""
        for layer in self.layers:
            if layer.index not in self.gatherer.pinned:
                for part in layer.sharded:
                    part.forbid_reads()

    # -- one layer at a time, gathered explicitly -----------------------------------------------

    def gather_layer(self, layer: LayerWeights) -> None:
        """Makes a layer's whole newest training copy readable on the compute stream; a collective.

        What is there already stays as it is; what is not sharded is only waited for.
        """
        self.gatherer.wait_resident(layer)
        if layer.sharded:
            if not self.gatherer.is_live(layer):
                self.gatherer.gather(layer)
            self.gatherer.use(layer)
            for part in layer.sharded:  # until it is given up
                part.allow_reads()

    def release_layer(self, layer: LayerWeights) -> None:
        """Gives a layer's whole copy up after all compute so far; nothing for a resident layer."""
        if self.gatherer.is_live(layer):
            self.gatherer.release(layer)

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Gathers all layers' whole newest copies for the length of the block; a collective.

        What is written into parameters meanwhile is lost, unless :meth:`adopt` takes it over.
        """
        self.settle()
        mine = {layer.index for layer in self.layers if layer.sharded} - self.gatherer.pinned
        for layer in self.layers:
            self.gather_layer(layer)
            self.gatherer.lent.add(layer.index)
        self.gatherer.pinned |= mine  # through whatever is called in the block
        try:
            yield
        finally:
            self.gatherer.pinned -= mine
            self.gatherer.release_all()

    @property
    def are_readable(self) -> bool:
        """Whether every layer's whole copy is on this rank."""
        return all(self.gatherer.is_live(layer) for layer in self.layers if layer.sharded)

    def buckets(
        self, parts: Callable[[LayerWeights], Iterable[ShardedWeights]], limit: int = BUCKET_BYTES
    ) -> Iterator[Bucket]:
        """Yields whole sharded parameters, some at a time; a collective: all ranks take all.

        No update may be pending. A bucket's memory is its tensors' own. What the user has gathered
        is taken from there, as it may have been written to.

        ``parts``: which parts of a layer to take. ``limit``: bytes of a bucket; a parameter that is
        larger is a bucket of its own.
        """
        self.settle()
        for layer in self.layers:
            for part in parts(layer):
                if layer.index in self.gatherer.pinned and self.gatherer.is_live(layer):
                    self.gatherer.use(layer)
                    slots = part.layout.slots
                    yield Bucket({id(s.parameter): part.storage.view(s) for s in slots}, None)
                    continue
                for slots, low, high in part.buckets(limit):
                    flat, arrived = self.gatherer.bring(part, low, high)
                    try:
                        yield Bucket({id(s.parameter): s.within(flat, low) for s in slots}, arrived)
                    finally:
                        # It may be dropped unused: without this wait its memory could be given to
                        # compute while the gather still writes to it.
                        self._pipeline.streams.compute_waits(arrived)

    def frozen_on_first(self, first: bool) -> Iterator[dict[int, torch.Tensor]]:
        """The same as :meth:`copies_on_first`, for frozen parameters."""
        return self.copies_on_first(
            first, lambda layer: [part for part in layer.sharded if part is layer.frozen]
        )

    def copies_on_first(
        self, first: bool, parts: Callable[[LayerWeights], Iterable[ShardedWeights]]
    ) -> Iterator[dict[int, torch.Tensor]]:
        """Copies whole sharded parameters to the host of the rank that is ``first``; a collective.

        Returns:
            For each of :meth:`buckets`, ``id(parameter)`` -> a copy on the CPU; empty on others.
        """
        for bucket in self.buckets(parts):
            self._pipeline.streams.compute_waits(bucket.arrived)
            tensors = bucket.tensors if first else {}
            yield {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}

    def adopt(self) -> None:
        """Makes the shards of gathered layers what their parameters now hold."""
        with torch.no_grad():
            for layer in self.layers:
                if self.gatherer.is_live(layer):
                    for part in layer.sharded:
                        part.storage.keep_gathered()
        # Shards may be in host memory, which is read next without waiting for the device's copies.
        self._pipeline.streams.synchronize()

    def suspend(self) -> None:
        """Makes modules' hooks gather nothing until :meth:`resume`.

        Only what is there already can be used meanwhile.
        """
        if self.active is not None:
            self.settle()
            self.active = None

    def resume(self) -> None:
        """Makes modules' hooks gather layers for their uses again."""
        self.active = self.schedule

    def settle(self) -> None:
        """Leaves no pass half done, before something is gathered explicitly."""
        if self.schedule is not None:
            self.schedule.settle()

    @property
    def host_bytes(self) -> int:
        """Bytes of shards that are in host memory."""
        return 0 if self._home is None else self._home.num_bytes

    def when_moved(self, function: Callable[[], None]) -> None:
        """Has a function called whenever what this rank keeps of the weights is in other memory."""
        self._moving.append(function)

    def moved(self) -> None:
        """Tells that what this rank keeps of the weights is in other memory."""
        for function in self._moving:
            function()

    def when_closed(self, function: Callable[[], None]) -> None:
        """Has a function called in :meth:`close`."""
        self._closing.append(function)

    def close(self) -> None:
        """Gives the host memory of shards back; the pipeline has been closed before."""
        for function in self._closing:
            function()
        self._closing.clear()
        for layer in self.layers:
            if layer.frozen is not None:
                layer.frozen.storage.release()
        if self._home is not None:
            self._home.close()

    def hold(self, layer: LayerWeights) -> None:
        """Keeps a layer there whose weights the pass uses past its modules; a collective.

        The layer stays until the end of this pass, and through all later ones.
        """
        assert self.schedule is not None
        self.schedule.hold(layer.index)
        self.has_held = True
        self.when_held()

    def hold_all(self) -> None:
        """Does :meth:`hold` for every layer that is gathered; all ranks do so at this place."""
        assert self.schedule is not None
        if self.schedule.hold_all():
            self.has_held = True
            self.when_held()

    def forget(self) -> None:
        """Keeps nothing gathered: weights have changed or a pass was aborted."""
        self.gatherer.pinned.clear()
        if self.schedule is not None:
            self.schedule.forget()
        else:
            self.gatherer.release_all()
