"""The state of all layers as of one step, read beside training: copied before it is changed.

After a step a layer's last gradient is still to be committed; its update of the next step does
that, and the one after it commits the next gradient. In that time, a whole step, the layer's state
is that of the step, and is copied:

- on the host by the update worker (``_C.UpdateWorker.capture``), which does so when it has nothing
  else to do, and otherwise within the pass that would change the state. No update waits for it.
- on the device by a copy there, which precedes the next update on the device.

If there is no memory for the one or the other, whatever would change the state
(``LayerState.before_update``, ``before_change``) waits until it has been copied to pageable memory
on the host, or, if that has no room either, until it has been written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from hytrain import _C
from hytrain.checkpoint.gather import ParameterPlace, Piece
from hytrain.errors import HostMemoryError
from hytrain.hardware.gpu_memory import spare_gpu_bytes
from hytrain.kernels.host_memory import host_zeros
from hytrain.kernels.moments import native_arrays
from hytrain.model.layer_state import LayerState
from hytrain.model.state_format import StateArrays
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.testing import faults

logger = logging.getLogger(__name__)

_COPY_BYTES = 16 * 2**20
"""Bytes of state on the device copied to the host at once, and of memory touched at once."""


class CopyMemory:
    """Memory for one copy of each layer on the host, as far as there is room.

    Memory that is written for the first time comes from the kernel page by page, at a fraction of
    the rate at which it can be copied to. So it is touched before a save needs it, beside training,
    and kept for the next.

    Attributes:
        copies: by index, for layers on the host as far as there is room: uint8, 1-D, of the state's
            length, and the same in the update worker's form.
    """

    def __init__(self) -> None:
        self.copies: dict[int, tuple[torch.Tensor, _C.StateArrays]] = {}
        self._toucher: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copy, _ in list(self.copies.values()))

    def fit(self, layers: Iterable[LayerState], room: Callable[[], int]) -> None:
        """Makes memory for the layers that are on the host, and for no others; touched soon.

        None of what it has may be in use. ``room`` is asked if some is missing: bytes of host
        memory that may be taken.
        """
        here = {layer.index: layer for layer in layers if layer.placement == "cpu"}
        for index in self.copies.keys() - here.keys():
            del self.copies[index]
        missing = [layer for index, layer in here.items() if index not in self.copies]
        left = room() if missing else 0
        new: list[torch.Tensor] = []
        for layer in missing:
            size = layer.state_bytes
            if size > left:
                continue
            try:
                purpose = f"a copy of layer '{layer.name}' to save"
                copy = host_zeros(size, dtype=torch.uint8, purpose=purpose)
            except HostMemoryError as error:
                logger.warning("%s", error)
                break
            left -= size
            arrays = layer.form.split(copy, layer.shard_size)
            self.copies[layer.index] = copy, native_arrays(*arrays, layer.form.seed)
            new.append(copy)
        if new:
            self._touch(new)

    def _touch(self, new: list[torch.Tensor]) -> None:
        self._halt()

        def touch() -> None:
            for copy in new:
                for at in range(0, copy.numel(), _COPY_BYTES):
                    if self._stop.is_set():
                        return
                    # What a save may have copied there meanwhile stays.
                    part = copy[at : at + _COPY_BYTES]
                    _C.touch(part.data_ptr(), part.numel(), 1)

        self._toucher = threading.Thread(target=touch, name="hytrain-touch", daemon=True)
        self._toucher.start()

    def _halt(self) -> None:
        if self._toucher is not None:
            self._stop.set()
            self._toucher.join()
            self._toucher = None
            self._stop.clear()

    def wait_touched(self) -> None:
        """Waits until all of it has been touched (for measurements)."""
        if self._toucher is not None:
            self._toucher.join()

    def give_back(self) -> None:
        """Frees all of it; none of it may be in use. May be called twice."""
        self._halt()
        self.copies.clear()


class LayerSnapshot:
    """One layer's state as of the step, placed as it was then."""

    def __init__(self, layer: LayerState, pipeline: UpdatePipeline, memory: CopyMemory) -> None:
        """The layer's last step is final; ``memory`` has space for a copy, if there is room."""
        self.layer = layer
        self.is_on_host = layer.placement == "cpu"
        self._cpu, self._streams = pipeline.cpu, pipeline.streams
        self._memory = layer.memory
        self._done = threading.Event()
        self._issued: torch.cuda.Event | None = None
        self.left = len(layer.form.kinds) * len(layer.layout.slots)
        """Number of state tensors of parameters that are still to be written."""
        self._target: _C.StateArrays | None = None
        if layer.index in memory.copies:
            self._memory, self._target = memory.copies[layer.index]
        self.is_captured = self._target is not None
        """Whether the update worker takes the copy."""
        layer.hold_for(self.wait, updates=not self.is_captured)

    def begin(self) -> None:
        """Has the update worker bring the layer to its state as of the step, or copy it so."""
        if self._target is not None:
            self._cpu.worker.capture(self.layer.worker_index, self._target)
        elif self.is_on_host:
            self._cpu.settle(self.layer)

    @property
    def num_bytes(self) -> int:
        """Bytes that a copy takes."""
        return self._memory.nbytes

    def wait_captured(self) -> None:
        """Waits until the update worker has taken the copy; raises a WorkerError if it failed."""
        self._cpu.worker.wait_captured(self.layer.worker_index)
        self.copied()

    def copy(self) -> None:
        """Copies state of the device to the host; from here on the layer may change.

        Raises:
            HostMemoryError: there is no memory for it; the layer must not change yet.
        """
        source, size = self._memory, self._memory.numel()
        purpose = f"a copy of layer '{self.layer.name}' to save"
        target = host_zeros(size, dtype=torch.uint8, purpose=purpose)
        for at in range(0, size, _COPY_BYTES):  # on this thread's stream
            target[at : at + _COPY_BYTES].copy_(source[at : at + _COPY_BYTES])
        self._memory = target
        self.copied()

    def copy_on_device(self, pool: torch.cuda.MemPool | None) -> None:
        """Issues a copy on the device, on this thread's stream; RuntimeError if it has no room."""
        if pool is None:
            self._memory = self._memory.clone()
        else:
            with torch.cuda.use_mem_pool(pool, self._streams.device):
                self._memory = self._memory.clone()
            self._issued = torch.cuda.Event()
            self._issued.record()
        self.copied()

    def copied(self) -> None:
        """Records that the copy is there, or will be before what follows :meth:`wait`."""
        faults.point("save.copied")
        self._done.set()

    def arrays(self) -> StateArrays:
        """The state as of the step."""
        return self.layer.form.split(self._memory, self.layer.shard_size)

    def release(self) -> None:
        """Lets the layer change: all of it is written, or it is not wanted any more."""
        if self.is_captured and not self._done.is_set():
            self._cpu.worker.forget_capture(self.layer.worker_index)
        self._done.set()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> None:
        """Waits, and makes the update and compute streams wait, until the layer may change."""
        if self.is_captured and not self._done.is_set():
            self._cpu.worker.wait_captured(self.layer.worker_index)
            return
        self._done.wait()
        # Without these waits what is still being copied could be overwritten.
        self._streams.update_waits(self._issued)
        self._streams.compute_waits(self._issued)


class StateSnapshot:
    """All layers' state as of the last step, for one save."""

    def __init__(self, pipeline: UpdatePipeline, memory: CopyMemory) -> None:
        """Holds all layers: from here on none changes before it has been copied or written.

        Made between two steps, with no update begun; ``memory`` is in use until :meth:`release`.
        """
        self._cpu = pipeline.cpu
        self._updated = pipeline.streams.record_update()
        self._streams = pipeline.streams
        self._lock = threading.Lock()
        # A pool of its own: otherwise what a stream has freed stays that stream's, and training
        # would find the device full of unused memory.
        self._pool: torch.cuda.MemPool | None = None
        self._layers = {
            layer.index: LayerSnapshot(layer, pipeline, memory) for layer in pipeline.layers
        }
        try:
            # Last: from the first one on, the worker's threads take every core.
            for snapshot in self._layers.values():
                snapshot.begin()
        except BaseException:
            self.release()  # without this a later step would wait for what nobody copies
            raise

    def take(self, room: int) -> int:
        """Copies the layers, as far as there is room; in the thread that saves.

        ``room``: bytes of host memory that copies of state on the device may take.

        Returns:
            Bytes of state for which there was no room: they are read where they are.

        Raises:
            WorkerError: the update worker has failed.
        """
        if self._updated is not None:
            # State on the device may still be written by the step's update.
            torch.cuda.current_stream(self._streams.device).wait_event(self._updated)
        # Those on the device change first, at the end of the next step.
        without = self._copy_from_device(room)
        for snapshot in self._layers.values():
            if snapshot.is_captured:
                snapshot.wait_captured()
            elif snapshot.is_on_host:
                self._cpu.wait_settled(snapshot.layer)
                without += snapshot.num_bytes
        return without

    def _copy_from_device(self, room: int) -> int:
        """Copies the layers on the device; returns the bytes for which there was no room."""
        there = [snapshot for snapshot in self._layers.values() if not snapshot.is_on_host]
        for snapshot in there:
            self._wait_until_there(snapshot.layer)
        without = 0
        for snapshot in there[self._copy_on_device(there) :]:
            if snapshot.num_bytes > room:
                without += snapshot.num_bytes
                continue
            room -= snapshot.num_bytes
            try:
                snapshot.copy()
            except HostMemoryError as error:
                logger.warning("%s", error)
                without += snapshot.num_bytes
                room = 0
        return without

    def _copy_on_device(self, there: list[LayerSnapshot]) -> int:
        """Copies the first layers on the device, in milliseconds; returns how many had room."""
        device = self._streams.device
        # Asked here, not in the call that saves: the driver may take milliseconds.
        room = spare_gpu_bytes(device) if there else 0
        if there and device.type == "cuda":
            self._pool = torch.cuda.MemPool()
        for count, snapshot in enumerate(there):
            room -= snapshot.num_bytes
            if room < 0:
                return count
            try:
                snapshot.copy_on_device(self._pool)
            except RuntimeError as error:
                # Training may have taken the memory meanwhile: the copies go to the host.
                logger.info("no copy of the state on the device: %s", error)
                return count
        return len(there)

    def _wait_until_there(self, layer: LayerState) -> None:
        # It may have been on its way to the device: the copies must have been issued, then done.
        self._cpu.wait_moved(layer)
        if layer.state_ready is not None and self._updated is not None:
            torch.cuda.current_stream(self._streams.device).wait_event(layer.state_ready)

    def state(self, place: ParameterPlace, kind: str, piece: Piece) -> torch.Tensor:
        """This rank's piece of a state tensor, as of the step."""
        return place.read_in(self._layers[place.layer.index].arrays(), kind, piece)

    def written(self, place: ParameterPlace) -> None:
        """Records, in any thread, that one of a parameter's state tensors is not read any more.

        A layer that has no more is released.
        """
        snapshot = self._layers[place.layer.index]
        with self._lock:
            snapshot.left -= 1
            is_last = snapshot.left == 0
        if is_last:
            snapshot.release()

    def release(self) -> None:
        """Releases all layers, written or not."""
        for snapshot in self._layers.values():
            snapshot.release()
        self._pool = None
