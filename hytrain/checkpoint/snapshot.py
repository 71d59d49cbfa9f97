"""The state of all layers as of one step, read beside training: copied before it is changed.

After a step a layer's last gradient is still to be committed. The worker does that in the
background (``CpuUpdater.settle``); from then on the state is that of the step until the layer's
update of the step after the next one, which commits the next gradient. In that time, a whole step,
the layer is copied: on the device, where its state is there and the device has room, or into host
memory. Whatever would change its state before asks ``LayerState.before_change``, which waits for
the copy. Layers that there is no room for are read where they are, and training waits until they
are written.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from hytrain.checkpoint.device_copies import DeviceCopies
from hytrain.checkpoint.gather import Delivery, ParameterPlace, Piece
from hytrain.errors import HostMemoryError
from hytrain.kernels.host_memory import host_zeros
from hytrain.model.layer_state import LayerState
from hytrain.offload.pipeline import UpdatePipeline
from hytrain.testing import faults

logger = logging.getLogger(__name__)

_COPY_BYTES = 16 * 2**20
"""That one thread copies at once."""
_LEAST_THREADS = 2


def copy_threads(cores: int) -> int:
    """Threads that copy: half of a rank's cores, as there is a step's time for all of its state."""
    return max(_LEAST_THREADS, cores // 2)


class LayerSnapshot:
    """One layer's state; its place is where it was at the step."""

    def __init__(self, layer: LayerState) -> None:
        self.layer = layer
        self.is_on_host = layer.placement == "cpu"
        self._memory = layer.memory
        self._numel = layer.shard_size
        self._done = threading.Event()
        self.left = len(layer.layout.slots)
        """Parameters that are still to be written."""

    @property
    def num_bytes(self) -> int:
        """That a copy takes."""
        return self._memory.nbytes

    def copy(self, pool: ThreadPoolExecutor) -> None:
        """Takes a copy; from here on the layer may change.

        Raises:
            HostMemoryError: there is no memory for it; the layer must not change yet.
        """
        source, size = self._memory, self._memory.numel()
        purpose = f"a copy of layer '{self.layer.name}' to save"
        target = host_zeros(size, dtype=torch.uint8, purpose=purpose)
        parts = [
            (target[at : at + _COPY_BYTES], source[at : at + _COPY_BYTES])
            for at in range(0, size, _COPY_BYTES)
        ]
        if self.is_on_host:
            list(pool.map(_copy, *zip(*parts, strict=True)) if parts else ())
        else:
            for part in parts:  # on this thread's stream
                _copy(*part)
        self._memory = target
        self.copied()

    def copy_on_device(self, copies: DeviceCopies) -> bool:
        """Issues a copy on its device, if there is room; :meth:`copied` must follow it."""
        memory = copies.copy(self._memory)
        if memory is None:
            return False
        self._memory = memory
        return True

    def copied(self) -> None:
        """The copy on the device is there: from here on the layer may change."""
        faults.point("save.copied")
        self._done.set()

    def piece(self, place: ParameterPlace, kind: str, piece: Piece) -> torch.Tensor:
        """See :meth:`ParameterPlace.read`."""
        return place.read_in(self.layer.moments.split(self._memory, self._numel), kind, piece)

    def release(self) -> None:
        """Everything of it is written, or nobody wants it any more: the layer may change."""
        self._done.set()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def wait(self) -> None:
        """Until the layer may change."""
        self._done.wait()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)  # without Python's lock


class StateSnapshot:
    """All layers' state as of the last step, for one save."""

    def __init__(self, pipeline: UpdatePipeline) -> None:
        """From here on no layer changes before it has been copied or written.

        Args:
            pipeline: between two steps, with no update begun.
        """
        self._cpu = pipeline.cpu
        self._updated = pipeline.streams.record_update()
        self._streams = pipeline.streams
        self._copies = DeviceCopies(pipeline.streams.device)
        self._layers = {layer.index: LayerSnapshot(layer) for layer in pipeline.layers}
        for snapshot in self._layers.values():
            snapshot.layer.hold_for(snapshot.wait)
        self._cpu.settle()

    def take(self, room: int, threads: int = _LEAST_THREADS) -> int:
        """Copies the layers, as far as there is room; in the thread that saves.

        Args:
            room: bytes of host memory that copies may take.
            threads: that copy on the host.

        Returns:
            Bytes of state for which there was none: they are read where they are.

        Raises:
            WorkerError: the update worker has failed.
        """
        if self._updated is not None:
            # State on the device may still be written by the step's update.
            torch.cuda.current_stream(self._streams.device).wait_event(self._updated)
        without = 0
        # Those on the device change first, at the end of the next step; then, in the backward after
        # it, the last layers.
        order = sorted(self._layers.values(), key=lambda s: (s.is_on_host, -s.layer.index))
        there = self._copy_on_device([s for s in order if not s.is_on_host])
        with ThreadPoolExecutor(threads) as pool:
            for snapshot in order:
                if snapshot in there:
                    continue
                self._wait_until_there(snapshot)
                if snapshot.num_bytes > room:
                    without += snapshot.num_bytes
                    continue
                try:
                    snapshot.copy(pool)
                except HostMemoryError as error:
                    logger.warning("%s", error)
                    without += snapshot.num_bytes
                    room = 0
                    continue
                room -= snapshot.num_bytes
        return without

    def _copy_on_device(self, layers: Sequence[LayerSnapshot]) -> set[LayerSnapshot]:
        """Copies layers on the device as far as there is room; returns those that were."""
        issued: list[LayerSnapshot] = []
        for snapshot in layers:
            self._wait_until_there(snapshot)
            if not snapshot.copy_on_device(self._copies):
                break
            issued.append(snapshot)
        if issued and self._streams.is_cuda:
            # Without this wait an update could overwrite what is still being copied.
            torch.cuda.current_stream(self._streams.device).synchronize()
        for snapshot in issued:
            snapshot.copied()
        return set(issued)

    def _wait_until_there(self, snapshot: LayerSnapshot) -> None:
        layer = snapshot.layer
        if snapshot.is_on_host:
            self._cpu.wait_settled(layer)
            return
        # It may have been on its way to the device: the copies must have been issued, then done.
        self._cpu.wait_moved(layer)
        if layer.state_ready is not None and self._updated is not None:
            torch.cuda.current_stream(self._streams.device).wait_event(layer.state_ready)

    def state(self, place: ParameterPlace, kind: str, piece: Piece) -> torch.Tensor:
        """This rank's piece of a state tensor, as of the step."""
        return self._layers[place.layer.index].piece(place, kind, piece)

    def delivered(self, deliveries: Sequence[Delivery]) -> None:
        """Parameters have been written everywhere; a layer that has no more is let go."""
        written = Counter(delivery.place.layer.index for delivery in deliveries)
        for index, count in written.items():
            snapshot = self._layers[index]
            snapshot.left -= count
            if snapshot.left == 0:
                snapshot.release()

    def release(self) -> None:
        """Lets all layers go, written or not."""
        for snapshot in self._layers.values():
            snapshot.release()
        self._copies.close()
