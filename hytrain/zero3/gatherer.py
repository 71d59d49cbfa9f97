"""Gathers the whole training copy of a sharded layer, and gives it up again.

The copy's memory belongs to the compute stream: it is taken and given back there, in the order of
the kernels that use it, so that the allocator has to wait for no other stream. The gather runs on
the communication stream, after everything that compute had queued when the memory was taken;
compute waits for it only before the layer's first kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.model.layer_state import LayerState
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.zero3.layer_weights import LayerWeights, ShardedWeights


class Presence(Enum):
    """Where a sharded layer's whole copy is."""

    AWAY = "away"
    COMING = "coming"
    """It has memory, and is being gathered or about to be."""
    THERE = "there"
    """Whatever compute runs from now on sees it."""


@dataclass(slots=True)
class _Flight:
    """A layer that is there, or on its way."""

    layer: LayerWeights
    parts: list[ShardedWeights]
    memory_free: torch.cuda.Event | None
    """Recorded after all earlier uses of the memory."""
    arrived: torch.cuda.Event | None = None
    is_started: bool = False
    is_waited: bool = False
    """Whether compute has been made to wait for the gather."""


class LayerGatherer:
    """Gathers and releases layers, one at a time, in the order of the calls."""

    def __init__(self, pipeline: UpdatePipeline, collectives: ShardCollectives) -> None:
        self._pipeline = pipeline
        self._streams = pipeline.streams
        self._collectives = collectives
        self._flights: dict[int, _Flight] = {}
        self._held_back: list[LayerWeights] = []
        self.most_live = 0
        """The largest number of layers that were there, or had memory, at one time."""
        self.on_change: Callable[[LayerWeights, Presence], None] | None = None
        """Called for every layer that comes, is there, or is given up."""
        self.pinned: set[int] = set()
        """Layers gathered outside of passes: while they are in this set, no pass gives them up."""
        self.lent: set[int] = set()
        """Layers whose whole copy the user was given, who may keep tensors in its memory."""

    def _tell(self, layer: LayerWeights, presence: Presence) -> None:
        if self.on_change is not None:
            self.on_change(layer, presence)

    def is_live(self, layer: LayerWeights) -> bool:
        """Whether the layer's whole copy is there or on its way."""
        return layer.index in self._flights

    def gather(self, layer: LayerWeights, *, ahead: bool = False) -> None:
        """Starts to gather a layer that is not live.

        ``ahead``: it is not needed yet. If this rank's update of it may not be done, the gather and
        those after it are held back instead of blocking, until :meth:`start_held` or a gather that
        is needed.
        """
        parts = layer.sharded
        assert parts
        for part in parts:
            part.storage.materialize()
        # Recorded on the compute stream, whose memory it is: without it the gather could write to
        # the memory while a kernel that is queued still reads what was there.
        event = self._streams.new_event()
        self._flights[layer.index] = _Flight(layer, parts, event)
        self.most_live = max(self.most_live, len(self._flights))
        self._held_back.append(layer)
        self._tell(layer, Presence.COMING)
        if not ahead or not any(_may_block(held) for held in self._held_back):
            self.start_held()

    def start_held(self) -> None:
        """Starts the gathers that were held back, in their order."""
        held, self._held_back = self._held_back, []
        for layer in held:
            self._start(layer)

    def _start(self, layer: LayerWeights) -> None:
        flight = self._flights[layer.index]
        states = _sharded_states(layer)
        for state in states:
            # The shard is then the newest, or a copy in flight that the event below covers.
            self._pipeline.wait(state)
        with self._streams.on_communication(after=flight.memory_free):
            # Without this wait the old shard could be sent, or one that the copy from the host, or
            # the update on the device, is still writing.
            for ready in (state.update.ready for state in states):
                if self._streams.is_cuda and ready is not None:
                    self._streams.communication.wait_event(ready)
            for part in flight.parts:
                self._gather_part(part)
            # After this gather only: a wait for the whole stream would also wait for later ones.
            flight.arrived = self._streams.record_communication()
        flight.is_started = True

    def _gather_part(self, part: ShardedWeights) -> None:
        storage = part.storage
        for (low, high, flat), (begin, own) in zip(storage.runs, storage.parts, strict=True):
            sizes = part.sizes_within(low, high)
            self._gather_run(flat, own, begin - low, sizes, part.layout.name)

    def _gather_run(
        self, flat: torch.Tensor, part: torch.Tensor, at: int, sizes: list[int], name: str
    ) -> None:
        if part.device != flat.device or self._collectives.world_size == 1:
            own = flat[at : at + part.numel()]
            trace = self._pipeline.trace
            if trace is not None and part.device != flat.device:
                with trace.weights_to_device(name, part.numel() * part.element_size()):
                    own.copy_(part, non_blocking=True)
            else:
                own.copy_(part, non_blocking=True)
            part = own
        self._collectives.all_gather(flat, sizes, name, part=part)

    def bring(
        self, part: ShardedWeights, low: int, high: int
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Gathers ``[low, high)``, of one dtype, into new memory; returns that and its event.

        A collective. Passes are not told, parameters stay what they are. No update may be pending.
        """
        self.start_held()
        storage = part.storage
        dtype = next(flat.dtype for begin, end, flat in storage.runs if begin <= low < end)
        flat = torch.empty(high - low, dtype=dtype, device=storage.device)
        begin, own = next(iter(storage.shard_slices(low, high)), (low, flat[:0]))
        # After compute so far, whose memory it is: a kernel that is queued may still read what was
        # there.
        with self._streams.on_communication():
            sizes = part.sizes_within(low, high)
            self._gather_run(flat, own, begin - low, sizes, part.layout.name)
            return flat, self._streams.record_communication()

    def wait_resident(self, layer: LayerWeights) -> None:
        """Waits until weights of a layer that are whole on every rank are the newest."""
        if layer.resident:
            self.start_held()
            for state in layer.resident:
                self._pipeline.wait(state)

    def use(self, layer: LayerWeights) -> None:
        """Makes what compute runs from now on see the weights of a layer, which must be live."""
        flight = self._flights[layer.index]
        if not flight.is_started:
            self.start_held()
        if not flight.is_waited:
            # Without this wait the layer's kernels would read weights that have not arrived.
            self._streams.compute_waits(flight.arrived)
            flight.is_waited = True
            self._tell(layer, Presence.THERE)

    def release(self, layer: LayerWeights) -> None:
        """Gives the layer's whole copy up, after all compute so far; a pinned layer stays."""
        if layer.index in self.pinned:
            return
        # The memory goes back to compute's allocator: without the wait in use() a gather in flight
        # could write over the next tensor that is put there.
        self.use(layer)
        flight = self._flights.pop(layer.index)
        was_lent = layer.index in self.lent
        self.lent.discard(layer.index)
        for part in flight.parts:
            if was_lent:
                part.storage.dismiss_to_holders()
            else:
                part.storage.dismiss()
        self._tell(layer, Presence.AWAY)

    def release_all(self) -> None:
        """Gives up every layer that is not pinned."""
        for flight in list(self._flights.values()):
            self.release(flight.layer)

    @property
    def live(self) -> frozenset[int]:
        """Indices of the layers that are there or on their way."""
        return frozenset(self._flights)


def _sharded_states(layer: LayerWeights) -> tuple[LayerState, ...]:
    """The trained weights that a gather of the layer brings."""
    return () if layer.resident else layer.trained


def _may_block(layer: LayerWeights) -> bool:
    """Whether a gather may have to wait for this rank's own update."""
    updates = [state.update for state in _sharded_states(layer)]
    return any(not update.waited and update.updated_by == "cpu" for update in updates)
