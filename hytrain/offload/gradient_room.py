"""Room on the device for the passes, while gradients wait there for the CPU's update.

A CPU-placed layer's gradient stays on the device until the worker has fetched it. If the worker
is slower than backward, or copies the state of layers that move, many are there at once. The
placement is planned with a few of them (:attr:`GradientRoom.kept`). Any others take free memory; if
the passes need it, they wait for the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from hytrain.hardware.gpu_memory import allocated_bytes
from hytrain.model.layer_state import LayerState
from hytrain.offload.cpu_updater import CpuUpdater
from hytrain.offload.streams import Streams


class GradientRoom:
    """Makes the passes wait if gradients on their way to the host would leave them no memory."""

    def __init__(self, layers: Sequence[LayerState], cpu: CpuUpdater, streams: Streams) -> None:
        self._cpu = cpu
        self._device = streams.device
        sizes = [layer.shard_size * layer.gradient_dtype.itemsize for layer in layers]
        self._all_gradients = sum(sizes)
        whole = [layer.layout.size * layer.gradient_dtype.itemsize for layer in layers]
        # A layer's gradients as autograd makes them, and what they are copied to.
        self._next_layer = 2 * max(whole, default=0)
        self.kept = self._next_layer + 2 * max(sizes, default=0)
        """Bytes that every placement leaves to gradients in flight: beside those of the layer whose
        backward runs, one that the worker updates and one that waits, so that neither backward nor
        the worker idles."""
        self._most = self._most_in_forward = 0
        self.is_watching = False
        """Whether memory may become short before the next step's last backward."""
        self.num_waits = 0
        """How often a pass has waited for the worker to fetch a gradient so far."""

    def begin_step(
        self, limit: int, reserve: int, transient: int | None, growth: int | None
    ) -> None:
        """Sets the limits of a step whose last backward begins; its activations are there.

        Args:
            limit: bytes of the device that this process may use.
            reserve: bytes that stay free; gaps between blocks may take them.
            transient: bytes that a layer's backward allocates and frees beside its gradients.
                None before a step has shown them: half of the free memory is left to them.
            growth: the most bytes that a layer's forward leaves to its backward. None before a
                step has shown them: the next forward waits for all gradients.
        """
        allocated = allocated_bytes(self._device)[0]
        if transient is None:
            transient = (limit - allocated) // 2
        free = limit - reserve - transient
        self._most = free - self._next_layer
        self._most_in_forward = 0 if growth is None else free - growth
        # As a rule all layers' gradients fit beside all activations, and this is not looked at
        # again.
        self.is_watching = allocated + self._all_gradients > self._most

    def end_backward(self) -> None:
        """Every gradient has been sent; the next forward's activations take their place."""
        self._most = self._most_in_forward

    def stop(self) -> None:
        """Stops watching: no gradient of this step leaves for the host."""
        self.is_watching = False

    @property
    def in_flight(self) -> int:
        """Bytes of gradients on the device that the worker has not fetched."""
        gradients = (layer.update.gradient for layer in self._cpu.unfetched.values())
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    @property
    def is_short(self) -> bool:
        """Whether gradients that the worker can fetch take memory that a pass needs."""
        if not (self.is_watching and self._cpu.unfetched):
            return False
        return allocated_bytes(self._device)[0] > self._most

    def wait(self) -> None:
        """Waits until the worker has fetched enough gradients that the pass has room, or all.

        Without this wait what the next layer allocates would not fit beside gradients that are
        still on the device: the placement leaves only :attr:`kept` bytes to them. The worker
        needs nothing from this thread to fetch them: whatever a gradient waits for, other ranks'
        collectives included, was queued before it was sent.
        """
        while self.is_short:
            self.num_waits += 1
            self._cpu.wait_fetched()
            self._cpu.release_fetched()
