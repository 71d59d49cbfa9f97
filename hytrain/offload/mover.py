"""Moves a layer's optimizer state between host and device while training goes on.

A layer moves between two steps, when its last update is final. Its training copy stays where it
is, so no forward waits for a move; the layer's next update does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hytrain.hardware.gpu_memory import give_back_cached
from hytrain.kernels.host_memory import host_zeros, taking_host_memory
from hytrain.model.layer_state import LayerState
from hytrain.model.layer_update import Placement
from hytrain.offload.cpu_updater import CpuUpdater, native_state
from hytrain.offload.host_blocks import pinned_zeros
from hytrain.offload.streams import Streams


@dataclass(frozen=True, slots=True)
class _Move:
    """What must live until the worker is done with a move."""

    layer: LayerState
    old_state: torch.Tensor
    gradient: torch.Tensor | None
    event: torch.cuda.Event | None
    """The worker has only the event's handle, which is invalid once torch destroys the event."""


class LayerMover:
    """Changes the placement of layers; the worker copies the bytes."""

    def __init__(self, cpu: CpuUpdater, streams: Streams) -> None:
        self._cpu = cpu
        self._streams = streams
        self._moves: list[_Move] = []
        self._leaving: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """Pinned state that is being copied to the device, and the event behind the copy."""

    def to_gpu(self, layer: LayerState) -> None:
        """Moves a layer's state to the device, for its updates from the next step on.

        A pending gradient is committed on the host first, by the kernel that previewed it.

        Raises:
            torch.OutOfMemoryError, HostMemoryError: the device, which may be the CPU, does not
                have enough memory for the state; nothing has changed.
        """
        if layer.form.optimizer is not None:
            layer.before_update()
            self._leaving.append((layer.memory, self._copy_state(layer, "gpu")))
            return
        # A move to the host that is under way keeps the state that it reads on the device: without
        # this wait the device would have to hold two.
        self._cpu.wait_moved(layer)
        layer.before_update()  # a pending gradient is committed
        memory = self._device_memory(layer)
        # The allocator gives memory in compute's order: without the event the copy could overwrite
        # what a queued kernel still reads there.
        free = self._streams.new_event()
        if layer.state_ready is None:
            layer.state_ready = self._streams.new_event()
        self._keep(layer, free)
        layer.place("gpu", memory)
        self._cpu.submit_leave(layer, native_state(layer), free)
        layer.moving = True

    def _device_memory(self, layer: LayerState) -> torch.Tensor:
        size = layer.bytes_at("gpu")
        while True:
            give_back_cached(self._streams.device, size)
            try:
                with taking_host_memory(_state_of(layer), size):  # if the device is the CPU
                    return torch.empty(size, dtype=torch.uint8, device=self._streams.device)
            except torch.OutOfMemoryError:
                if not self._cpu.unfetched:
                    raise
                # A placement leaves room for few gradients in flight, and more may be there.
                # Without this wait a layer that fits would be taken for one that does not.
                self._cpu.wait_fetched()
                self._cpu.release_fetched()

    def to_cpu(self, layer: LayerState) -> None:
        """Moves a layer's state to the host, for its updates from the next step on.

        Raises:
            HostMemoryError: the host does not have enough memory for the state or its pinned
                gradient; nothing has changed.
        """
        if layer.form.optimizer is not None:
            old = layer.state
            self._copy_state(layer, "streamed")
            for part in old:
                assert isinstance(part, torch.Tensor)
                # It is dropped here before the copy has run: compute would write there.
                self._streams.used_on_update(part)
            return
        # The event below then covers an earlier move to the device, too: without this wait the copy
        # back could read state that has not arrived there.
        self.wait(layer)
        self._cpu.allocate_for([layer])
        memory = host_zeros(layer.bytes_at("cpu"), dtype=torch.uint8, purpose=_state_of(layer))
        # Without the event the copy could read state that the last update still writes.
        ready = self._streams.record_update()
        device = native_state(layer)
        self._keep(layer, ready)
        layer.place("cpu", memory)
        self._cpu.submit_arrive(layer, native_state(layer), device, ready)
        layer.moving = True

    def _copy_state(self, layer: LayerState, placement: Placement) -> torch.cuda.Event | None:
        """Copies the state of a layer unknown to the worker; returns the event behind the copy."""
        old = layer.state
        if placement == "gpu":
            memory = self._device_memory(layer)
        else:
            memory = pinned_zeros(layer.bytes_at(placement), self._streams.device, _state_of(layer))
        # On the update's stream, after compute, which may have used the memory. State on the device
        # is written on that stream; state on the host, by another one: without the wait half of the
        # copy could be of the step before.
        with self._streams.on_update():
            self._streams.update_waits(layer.state_ready)
            layer.place(placement, memory)
            for there, here in zip(layer.state, old, strict=True):
                assert isinstance(there, torch.Tensor)
                assert isinstance(here, torch.Tensor)
                there.copy_(here, non_blocking=True)
            layer.state_ready = self._streams.record_update()
        return layer.state_ready

    def _keep(self, layer: LayerState, event: torch.cuda.Event | None) -> None:
        # The worker still reads or writes the old state, and copies the gradient of the step just
        # made. Freed now, their memory could be reused under it.
        self._moves.append(_Move(layer, layer.memory, layer.update.gradient, event))
        layer.update.release_gradient()

    def wait(self, layer: LayerState) -> None:
        """Waits for a GPU-placed layer's move, before its state is used on the update stream."""
        if not layer.moving:
            return
        # First until the worker has recorded the event (a wait on an older record would pass at
        # once); then the update stream waits for the copies themselves.
        self._cpu.wait_moved(layer)
        self._streams.update_waits(layer.state_ready)
        layer.moving = False
        self.release()

    def finish(self) -> None:
        """Waits for all moves and lets go of the state that has left."""
        for move in list(self._moves):
            self._cpu.wait_moved(move.layer)
        self.release()

    @property
    def bytes_leaving_device(self) -> int:
        """Bytes of old state on the device that have not been given back."""
        return sum(m.old_state.nbytes for m in self._moves if m.layer.placement == "cpu")

    def release(self) -> None:
        """Lets go of state that has left its old place."""
        still: list[_Move] = []
        for move in self._moves:
            if self._cpu.is_moving(move.layer):
                still.append(move)
            elif move.layer.placement == "cpu":
                move.layer.moving = False
        self._moves = still
        # Were memory unpinned before, the copy could fault, or read what has come there since.
        self._leaving = [(m, e) for m, e in self._leaving if e is not None and not e.query()]

    def close(self) -> None:
        """Lets go of everything; the worker has been closed."""
        self._moves.clear()
        self._leaving.clear()


def _state_of(layer: LayerState) -> str:
    return f"the optimizer state of layer '{layer.name}'"
