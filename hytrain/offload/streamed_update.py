"""Updates on the device with state that comes from the host, piece by piece, and goes back there.

It begins when the step's outcome is known: nothing is previewed, and nothing is taken back. Two
pieces are in flight: one comes, or leaves, while the other is updated. Layers are updated in the
order in which the next forward uses them. If a layer's state is on the device, only the copies are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.model.layer_state import LayerState
from hytrain.model.layout import ParameterSlot
from hytrain.model.partition import in_buckets
from hytrain.model.state_format import StateArrays
from hytrain.offload.streams import Streams
from hytrain.offload.update_groups import IN_FLIGHT
from hytrain.trace.recorder import Recorder

PIECE_ELEMENTS = 2**25
"""The most elements of a piece; a larger matrix is one piece. A copy of 256 MiB takes 5 ms: long
compared with starting one, short compared with a step."""
_WORK_BYTES = 16
"""Bytes per element of what is updated at once: its fp32 gradient, momentum that is kept in fewer
bytes, a quotient in fp32 and one in half precision, and products of that size."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """What is updated at once: ``[begin, end)`` of the shard, all of one parameter."""

    slot: ParameterSlot
    group: int
    begin: int
    end: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.end - self.begin


@dataclass(slots=True)
class _Buffer:
    """Memory on the device for the state of a piece.

    Attributes:
        memory: uint8.
        came: event: the state has come.
        left: event: the state of the piece before has left.
    """

    memory: torch.Tensor
    came: torch.cuda.Event | None = None
    left: torch.cuda.Event | None = None


class StreamedUpdate:
    """Updates every layer that has a :class:`DeviceOptimizer`."""

    def __init__(self, layers: Sequence[LayerState], streams: Streams) -> None:
        """Takes the buffers, if the state of any layer is on the host."""
        self.layers = [layer for layer in layers if layer.form.optimizer is not None]
        self._streams = streams
        self._pieces = {layer.index: pieces_of(layer) for layer in self.layers}
        self._buffers: list[_Buffer] = []
        self._queue: list[tuple[LayerState, list[_Unit]]] = []
        """Pieces of this step whose state is on the host, in order."""
        self.fit_buffers()

    @property
    def waiting_bytes(self) -> int:
        """Bytes of gradients on the device that wait for the step's outcome."""
        gradients = [layer.update.gradient for layer in self.layers]
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of device memory for pieces."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def fit_buffers(self) -> None:
        """Takes the buffers if any state is on the host, and frees them if none is.

        To be called before a step's update, which could not be completed without memory for them.
        """
        is_needed = any(layer.placement == "streamed" for layer in self.layers)
        if is_needed == bool(self._buffers):
            return
        # Without this wait the first copy could write to memory that a queued kernel still reads;
        # and memory that is given back could be given out with a copy from it in flight.
        self._streams.synchronize()
        self._buffers = []
        if is_needed:
            size = max(piece_bytes(layer) for layer in self.layers)
            memories = [
                torch.empty(size, dtype=torch.uint8, device=self._streams.device)
                for _ in range(IN_FLIGHT)
            ]
            self._buffers = [_Buffer(memory) for memory in memories]

    def give_back(self) -> None:
        """Frees the buffers until the next step."""
        if self._buffers:
            # Without this wait memory with a copy in flight could be given out again.
            self._streams.synchronize()
        self._buffers = []

    # -- a step ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Queues the copies of the first pieces: state does not depend on the step's outcome.

        Whether :meth:`run` follows or not, this changes no state.
        """
        self._queue = [
            (layer, piece)
            for layer in self.layers
            if layer.placement == "streamed"
            for piece in self._pieces[layer.index]
        ]
        for number in range(IN_FLIGHT):
            self._bring(number)

    def _bring(self, number: int) -> None:
        """Queues the copy of a piece's state to its buffer, if there is such a piece."""
        if number >= len(self._queue):
            return
        layer, piece = self._queue[number]
        buffer = self._buffers[number % IN_FLIGHT]
        # The buffer's last piece must have left it, or it would go back as this one's state. And
        # this state must have come back from its last update, or from the device in a move: what is
        # read would be half of one step and half of another.
        with self._streams.copying("in", (buffer.left, layer.state_ready)):
            for here, there in zip(_cut(layer, buffer, piece), _state(layer, piece), strict=True):
                here.copy_(there, non_blocking=True)
            buffer.came = self._streams.record_current()

    @torch.no_grad()
    def run(
        self, hyper: Sequence[AdamHyper], outcome: torch.Tensor, trace: Recorder | None
    ) -> None:
        """Queues all updates, after :meth:`begin`; the host waits for nothing.

        ``outcome``: fp32, on the device; the first element is the gradients' scale. ``trace``: is
        told of each layer's update.
        """
        number = 0
        with self._streams.on_update():
            if trace is not None:
                trace.updates_begin()
            for layer in self.layers:
                if layer.holds_updates:
                    layer.before_update()
                for piece in self._pieces[layer.index]:
                    if layer.placement == "gpu":
                        self._update(layer, piece, _state(layer, piece), hyper, outcome)
                        continue
                    self._update_there(number, layer, piece, hyper, outcome)
                    number += 1
                self._queued(layer)
                if trace is not None:
                    trace.layers_updated({layer.index: layer.shard_size})
            # The next decision drops it: compute could write there before the updates have read it.
            self._streams.used_on_update(outcome)

    def _update_there(
        self,
        number: int,
        layer: LayerState,
        piece: Sequence[_Unit],
        hyper: Sequence[AdamHyper],
        outcome: torch.Tensor,
    ) -> None:
        """Updates a piece whose state is on the host; to be called within ``on_update``."""
        buffer = self._buffers[number % IN_FLIGHT]
        arrays = _cut(layer, buffer, piece)
        # Without this wait the update could read state that is still on its way.
        self._streams.update_waits(buffer.came)
        self._update(layer, piece, arrays, hyper, outcome)
        # Without the event the copy back could take state that the update still writes.
        with self._streams.copying("out", (self._streams.record_update(),)):
            for there, here in zip(_state(layer, piece), arrays, strict=True):
                there.copy_(here, non_blocking=True)
            buffer.left = layer.state_ready = self._streams.record_current()
        self._bring(number + IN_FLIGHT)

    def _update(
        self,
        layer: LayerState,
        piece: Sequence[_Unit],
        arrays: Sequence[torch.Tensor],
        hyper: Sequence[AdamHyper],
        outcome: torch.Tensor,
    ) -> None:
        optimizer, gradient = layer.form.optimizer, layer.update.gradient
        assert optimizer is not None
        assert gradient is not None
        for unit in piece:
            at = slice(unit.begin - piece[0].begin, unit.end - piece[0].begin)
            weight, *states = (x[at].view(unit.shape) for x in arrays)
            values = [state.float() for state in states]  # the same tensors if they are fp32
            own = gradient[unit.begin : unit.end].to(torch.float32, copy=True).mul_(outcome[0])
            low, high = layer.begin + unit.begin, layer.begin + unit.end
            read, parameter = hyper[unit.group].values, unit.slot.parameter
            optimizer.update(weight, tuple(values), own.view(unit.shape), read, parameter)
            for state, value in zip(states, values, strict=True):
                if state is not value:
                    state.copy_(value)
            with layer.storage.writing(low, high, weight.view(-1)) as copy:
                copy.copy_(weight.view(-1))

    def _queued(self, layer: LayerState) -> None:
        update = layer.update
        assert update.gradient is not None
        # It is dropped below, before the launches that read it have run.
        self._streams.used_on_update(update.gradient)
        # Behind each layer: the first layers' forward need not wait for the last's update. Without
        # the event forward would read weights that are being written.
        update.apply(self._streams.record_update())

    def skip(self) -> None:
        """Skips the step: gradients are dropped, and nothing has changed."""
        for layer in self.layers:
            layer.update.release_gradient()


def _state(layer: LayerState, piece: Sequence[_Unit]) -> list[torch.Tensor]:
    """A piece of a layer's master weights and state tensors, wherever these are."""
    return [x[piece[0].begin : piece[-1].end] for x in _tensors(layer.state)]


def _cut(layer: LayerState, buffer: _Buffer, piece: Sequence[_Unit]) -> list[torch.Tensor]:
    """A buffer's memory, cut into the tensors of a piece of a layer's state."""
    numel = piece[-1].end - piece[0].begin
    memory = buffer.memory[: layer.form.state_bytes(numel)]
    return _tensors(layer.form.split(memory, numel))


def _tensors(arrays: StateArrays) -> list[torch.Tensor]:
    return [x for x in arrays if isinstance(x, torch.Tensor) and x.numel()]


def piece_bytes(layer: LayerState) -> int:
    """Bytes of the state of a layer's largest piece; 0 if Adam updates it."""
    spans = (piece[-1].end - piece[0].begin for piece in pieces_of(layer))
    return layer.form.state_bytes(max(spans, default=0))


def work_bytes(layer: LayerState) -> int:
    """Bytes that a layer's update takes on the device beside state and gradient; 0 for Adam."""
    return _WORK_BYTES * max(
        (unit.numel for piece in pieces_of(layer) for unit in piece), default=0
    )


def pieces_of(layer: LayerState) -> list[list[_Unit]]:
    """A layer's shard cut into pieces of whole units, in order; empty if Adam updates it."""
    if layer.form.optimizer is None:
        return []
    return in_buckets(_units(layer), lambda unit: unit.numel, PIECE_ELEMENTS)


def _units(layer: LayerState) -> Iterator[_Unit]:
    optimizer = layer.form.optimizer
    assert optimizer is not None
    for segment in layer.layout.segments:
        for slot in layer.layout.slots:
            low = max(slot.offset, layer.begin)
            high = min(slot.offset + slot.numel, layer.end)
            if low >= high or not segment.begin <= slot.offset < segment.end:
                continue
            shape, most = (-1,), PIECE_ELEMENTS
            if optimizer.whole_matrices:
                shape, most = tuple(slot.parameter.shape), slot.numel
                if len(shape) == 3:  # some of its matrices at a time
                    matrix = shape[1] * shape[2]
                    shape, most = (-1, *shape[1:]), max(1, PIECE_ELEMENTS // matrix) * matrix
            for begin in range(low, high, most):
                end = min(begin + most, high)
                yield _Unit(slot, segment.group, begin - layer.begin, end - layer.begin, shape)
