"""Room on the device for backward, while gradients wait there for the CPU's update.

A CPU-placed layer's gradient stays on the device until the worker has fetched it. A worker that is
far behind backward leaves many there: one that carries the state of layers that move, above all,
fetches nothing meanwhile. The placement was planned with as many as were measured; what comes
beyond that would take the memory that backward needs, so backward waits for the worker then.
"""

from __future__ import annotations

from collections.abc import Sequence

from hytrain.hardware.gpu_memory import allocated_bytes
from hytrain.model.layer_state import LayerState
from hytrain.offload.cpu_updater import CpuUpdater
from hytrain.offload.streams import Streams


class GradientRoom:
    """Makes backward wait where gradients on their way to the host would leave it no memory."""

    def __init__(self, layers: Sequence[LayerState], cpu: CpuUpdater, streams: Streams) -> None:
        self._cpu = cpu
        self._device = streams.device
        sizes = [layer.shard_size * layer.gradient_dtype.itemsize for layer in layers]
        self._all_gradients = sum(sizes)
        whole = [layer.layout.size * layer.gradient_dtype.itemsize for layer in layers]
        # A layer's gradients as autograd makes them, and what they are copied to.
        self._next_layer = 2 * max(whole, default=0)
        self._most = 0
        self.is_watching = False
        """Memory may become short in this step."""
        self.num_waits = 0
        """Layers' gradients that have been waited for so far."""

    def begin_step(self, limit: int, reserve: int, transient: int | None) -> None:
        """A step's last backward begins; its activations are there.

        Args:
            limit: bytes of the device that this process may use.
            reserve: bytes that stay free; gaps between blocks may take them.
            transient: bytes that a layer's backward allocates and frees beside its gradients.
                None, before a step has shown them: half of what is free is left to them.
        """
        allocated = allocated_bytes(self._device)[0]
        if transient is None:
            transient = (limit - allocated) // 2
        self._most = limit - reserve - transient - self._next_layer
        # As a rule all layers' gradients fit at once, and this is not looked at again.
        self.is_watching = allocated + self._all_gradients > self._most

    def end_step(self) -> None:
        """Every gradient has been sent."""
        self.is_watching = False

    @property
    def is_short(self) -> bool:
        """Whether gradients that the worker can fetch take memory that backward needs."""
        return bool(self._cpu.unfetched) and allocated_bytes(self._device)[0] > self._most

    def wait(self) -> None:
        """Until the worker has fetched so many that backward has room, or all.

        The worker needs nothing of this thread for that: whatever a gradient waits for, other
        ranks' collectives included, was queued before it was sent.
        """
        while self.is_short:
            self.num_waits += 1
            self._cpu.wait_fetched(next(iter(self._cpu.unfetched.values())))
            self._cpu.release_fetched()
