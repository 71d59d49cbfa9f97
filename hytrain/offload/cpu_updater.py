"""The CPU-placed layers: their state on the host, their pinned buffers, their update worker."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hytrain import _C
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.moments import native_arrays
from hytrain.model.layer_state import LayerState
from hytrain.model.layout import Segment
from hytrain.offload.pinned import PinnedMemory, norm_bytes
from hytrain.offload.slots import SlotPlan, plan_slots
from hytrain.offload.streams import Streams, event_handle

logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""Time without a finished chunk after which a wait for the worker warns."""

SHRINK_STEPS = 64
"""Steps without a move before pinned memory is given back. Layers that come and go must not have it
registered anew each time; and placements are compared for tens of steps after a move, in which
unpinning must not hold the driver's lock, which every launch takes."""
RELEASE_STEPS = 16
"""Steps per part that is given back: so few parts do not show in a median of steps."""

_NATIVE = {
    torch.float32: _C.DType.float32,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float16: _C.DType.float16,
}


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """How the CPU update runs.

    Attributes:
        chunk_elements: the most elements of a chunk.
        direct: whether updates are committed at once: no gradient stays pending.
        delay_seed: seed of the injected delays.
        max_delay_us: longest random delay before every copy and every pass (tests), in
            microseconds; 0 for none.
    """

    num_threads: int
    chunk_elements: int
    direct: bool = False
    delay_seed: int = 0
    max_delay_us: int = 0


def _report_stall(streams: Streams, tasks: str) -> None:
    logger.warning(
        "training waits for the CPU update, which has finished nothing for %g s (said once): %s%s. "
        "Copies that are not complete wait for the GPU, or for other ranks' collectives before "
        "them. An update that takes so long waits for a core, or for swapped memory",
        STALL_SECONDS,
        tasks,
        "".join(f"; {name} stream {state}" for name, state in streams.states()),
    )


def native_record(scale: float, hyper: Sequence[AdamHyper]) -> _C.StepRecord:
    """A step's record for the worker."""
    return _C.StepRecord(scale, [h.native() for h in hyper])


class CpuUpdater:
    """Passes gradients of CPU-placed layers to the update worker and waits for the results."""

    def __init__(
        self, layers: Sequence[LayerState], streams: Streams, settings: CpuSettings
    ) -> None:
        """Takes pinned memory for the CPU-placed layers, registers all layers, starts the worker.

        ``layers``: all layers in forward order, with their state in place.

        Raises:
            HostMemoryError: the pinned memory is refused; what was taken is given back.
        """
        self._all = list(layers)
        self._streams = streams
        self._chunks = _chunks(self._all, settings)
        plan = _plan(self._all, self._chunks, settings)
        self._direct = settings.direct
        self._closed = False
        self._steps_without_move = 0
        self.unfetched: dict[int, LayerState] = {}
        """Sent layers whose gradients may still be on the device, by number."""
        self.pinned = PinnedMemory(plan, len(self._all), streams.device)
        try:
            self.worker = self._make_worker(settings)
            try:
                # The thread starts last: layers and slot classes are added without a lock.
                self._register(plan)
                self.allocate_for(())
                self.worker.start()
            except BaseException:
                self.worker.close()  # it has threads, and the error keeps this frame
                raise
        except BaseException:
            self.pinned.close()
            raise

    def _make_worker(self, settings: CpuSettings) -> _C.UpdateWorker:
        worker = self._worker_on_device(settings)
        # The function refers neither to this object nor to the worker, which keeps it where no
        # garbage collector looks.
        worker.on_stall(STALL_SECONDS, partial(_report_stall, self._streams))
        return worker

    def _worker_on_device(self, settings: CpuSettings) -> _C.UpdateWorker:
        streams = self._streams
        if not streams.is_cuda:
            return _C.UpdateWorker.on_host(
                settings.num_threads, settings.delay_seed, settings.max_delay_us
            )
        return _C.UpdateWorker.on_cuda(
            streams.device.index or 0,
            streams.to_host.cuda_stream,
            streams.to_device.cuda_stream,
            settings.num_threads,
            settings.delay_seed,
            settings.max_delay_us,
        )

    def set_threads(self, num_threads: int) -> None:
        """Sets the number of threads for coming chunks; results do not depend on it."""
        self.worker.set_num_threads(num_threads)

    @property
    def layers(self) -> list[LayerState]:
        """The CPU-placed layers in forward order."""
        return [layer for layer in self._all if layer.placement == "cpu"]

    def _register(self, plan: SlotPlan) -> None:
        for slots in plan.classes:
            self.worker.add_slot_class(slots.slot_bytes)
        classes = iter(plan.class_of_chunk)
        for layer, spans in zip(self._all, self._chunks, strict=True):
            if not spans:
                continue  # it is updated on the device wherever its state is
            layer.update.weights_ready = self._streams.new_event()
            layer.worker_index = self.worker.add_layer(
                layer.name,
                _NATIVE[layer.gradient_dtype],
                event_handle(layer.update.weights_ready),
                self.pinned.take_norm(),
                native_state(layer) if layer.placement == "cpu" else _C.StateArrays(),
                [_native_chunk(layer, span, next(classes)) for span in spans],
            )

    def allocate_for(self, coming: Collection[LayerState]) -> None:
        """Takes the pinned memory for the CPU-placed layers and those that are about to be.

        Raises:
            HostMemoryError: the host does not have that much.
        """
        self._steps_without_move = 0
        self.pinned.grow(self.worker, self._on_host(coming))

    def _on_host(self, coming: Collection[LayerState]) -> list[bool]:
        names = {layer.index for layer in coming}
        return [
            layer.placement == "cpu" or layer.index in names
            for layer, spans in zip(self._all, self._chunks, strict=True)
            for _ in spans
        ]

    # -- one step ------------------------------------------------------------------------------

    def begin_step(self, sum_limit: float) -> None:
        """Begins a step's updates; previews stop past ``sum_limit`` (see ClipSettings)."""
        self.worker.begin_step(sum_limit)

    def send(self, layer: LayerState, sum_address: int, record: _C.StepRecord) -> None:
        """Queues the update of a layer whose gradient (and event) are set."""
        gradient = layer.update.gradient
        assert gradient is not None
        self._before_update(layer)
        self.unfetched[layer.index] = layer
        self.worker.submit_update(
            layer.worker_index,
            gradient.data_ptr(),
            event_handle(layer.update.gradient_ready),
            sum_address,
            record,
            self._direct,
        )

    def _before_update(self, layer: LayerState) -> None:
        if not layer.holds_updates:
            return
        if not self._direct:
            # An update changes state only by committing the gradient of the step before; once that
            # has been settled there is none.
            self.worker.wait_settled(layer.worker_index)
            if not self.has_pending(layer):
                return
        layer.before_update()

    def settle(self, layer: LayerState) -> None:
        """Queues the commit of a pending gradient without a wait; see :meth:`wait_settled`."""
        self.submit(layer, _C.Pass.settle)

    def wait_settled(self, layer: LayerState) -> None:
        """Waits until the state is that of the last step before :meth:`settle` was called."""
        self.worker.wait_settled(layer.worker_index)

    def submit(self, layer: LayerState, job_pass: _C.Pass) -> None:
        """Queues a pass over a layer."""
        self.worker.submit(layer.worker_index, job_pass)

    def submit_withdraw(self, layer: LayerState, destination: torch.Tensor) -> None:
        """Queues the return of a layer's gradient to the device and of its old weights.

        ``layer.update.gradient_ready`` must be recorded after ``destination`` was made.
        """
        self.worker.submit(
            layer.worker_index,
            _C.Pass.withdraw,
            destination.data_ptr(),
            event_handle(layer.update.gradient_ready),
        )

    def cancel(self, layer: LayerState) -> bool:
        """Takes a layer's update back if it has not begun; then its state is untouched."""
        return self.worker.cancel_update(layer.worker_index)

    def finalize(self, record: _C.StepRecord) -> int:
        """Tells the worker the step's outcome; returns how many begun layers need another pass."""
        return self.worker.finalize(record)

    def release_fetched(self) -> None:
        """Lets go of gradients that have left the device.

        None is needed again: an update that can still be cancelled has not been fetched, and any
        other is withdrawn from the host.
        """
        for layer in list(self.unfetched.values()):
            # A layer that has moved to the device since: its gradient is the update's there.
            if layer.placement == "cpu" and layer.update.gradient is not None:
                # Without the check the allocator could reuse the memory while it is being copied.
                if not self.is_fetched(layer):
                    continue
                layer.update.release_gradient()
            del self.unfetched[layer.index]

    def wait_fetched(self) -> None:
        """Waits until the worker has fetched one of the gradients of :attr:`unfetched`."""
        self.worker.wait_fetched([layer.worker_index for layer in self.unfetched.values()])

    def is_fetched(self, layer: LayerState) -> bool:
        """Whether the layer's gradient has left the device."""
        return self.worker.is_fetched(layer.worker_index)

    def has_pending(self, layer: LayerState) -> bool:
        """Whether a gradient of the layer is still to be committed."""
        return self.worker.has_pending(layer.worker_index)

    def weights_moved(self, layer: LayerState) -> None:
        """Tells the worker that a layer's training copy has moved; the layer has no jobs left."""
        spans = self._chunks[layer.index]
        if not spans:
            return
        addresses = [layer.storage.address(span.begin, span.end) for span in spans]
        self.worker.move_weights(layer.worker_index, addresses)

    def end_step(self) -> None:
        """Ends a step: pinned memory of layers that have left the host is given back in parts.

        Raises:
            WorkerError: the update worker has failed.
        """
        self._steps_without_move += 1
        if self._steps_without_move == SHRINK_STEPS:
            num_bytes = self.pinned.retire(self.worker, self._on_host(()))
            if num_bytes:
                logger.info("%.1f MiB of pinned memory are given back", num_bytes / 2**20)
        # Unpinning waits for the device and holds the driver's lock: only one part every few steps.
        elif self.pinned.is_retiring and self._steps_without_move % RELEASE_STEPS == 0:
            self.pinned.release(self.worker)

    # -- moves ---------------------------------------------------------------------------------

    def submit_leave(
        self, layer: LayerState, device: _C.StateArrays, free: torch.cuda.Event | None
    ) -> None:
        """Queues the move of a layer's state to the device, with ``layer.state_ready`` behind it.

        A pending gradient is committed first. The host's state must live until :meth:`is_moving`
        is false.

        Args:
            layer: the layer; its last step must be final.
            device: where the state goes.
            free: an event recorded after all earlier uses of that memory.
        """
        self._steps_without_move = 0
        handles = event_handle(free), event_handle(layer.state_ready)
        self.worker.submit_leave(layer.worker_index, device, *handles)

    def submit_arrive(
        self,
        layer: LayerState,
        host: _C.StateArrays,
        device: _C.StateArrays,
        ready: torch.cuda.Event | None,
    ) -> None:
        """Queues the move of a layer's state to the host, where its memory has been allocated.

        Both sides' state must live until :meth:`is_moving` is false.

        Args:
            host: where the state goes.
            device: where it is.
            ready: an event recorded after the layer's last update on the device.
        """
        handle = event_handle(ready)
        self.worker.submit_arrive(layer.worker_index, host, device, handle)

    def is_moving(self, layer: LayerState) -> bool:
        """Whether the worker has yet to finish a move of the layer."""
        return self.worker.is_moving(layer.worker_index)

    def wait_moved(self, layer: LayerState) -> None:
        """Waits until the worker is done with the layer's moves: their last copies are queued."""
        self.worker.wait_moved(layer.worker_index)

    # -- waiting -------------------------------------------------------------------------------

    def wait_weights(self, layer: LayerState, *, by_compute: bool = True) -> None:
        """Waits until the copy of the layer's newest weights is issued; compute then waits for it.

        Blocks the host: an event that is not recorded yet could not be waited on.

        ``by_compute``: if False, the caller makes another stream wait for the layer's
        ``update.weights_ready``.
        """
        if self._streams.is_cuda:
            # First until the worker has recorded the event for this update: a wait for the last
            # update's record would pass at once, and compute would read weights being written.
            self.worker.wait_issued(layer.worker_index)
            if by_compute:
                self._streams.compute_waits(layer.update.weights_ready)
        else:
            # No stream to put the wait on: the thread that computes waits for the copy itself.
            self.worker.wait_complete(layer.worker_index)

    def wait_all(self) -> None:
        """Waits until no job is left; copies back may still be in flight."""
        self.worker.wait_all()

    def wait_copies(self) -> None:
        """Waits until all layers' new copies are issued or, without a device, have arrived."""
        for layer in self.layers:
            self.wait_weights(layer, by_compute=False)

    def commit_pending(self) -> None:
        """Applies every pending gradient, so that the state is that of the last step."""
        # Whether a layer has a pending gradient is settled by its last job only.
        self.wait_all()
        for layer in self.layers:
            if self.has_pending(layer):
                layer.before_update()
                self.submit(layer, _C.Pass.commit)
        # The caller reads the state next: without this wait the worker could still be writing it.
        self.wait_all()

    def close(self) -> None:
        """Stops the worker and gives the pinned memory back. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.worker.close()  # first: no copy is queued any more
        # Without this wait a copy in flight would read or write memory that is unmapped below.
        self._streams.synchronize()
        self.pinned.close()


def slot_plan(layers: Sequence[LayerState], settings: CpuSettings) -> SlotPlan:
    """The pinned memory that these layers' updates need; their state need not exist yet."""
    return _plan(layers, _chunks(layers, settings), settings)


def pinned_bytes(layers: Sequence[LayerState], settings: CpuSettings, gpu_layers: int) -> int:
    """All pinned bytes with the state of all but the first ``gpu_layers`` layers on the host."""
    chunks = _chunks(layers, settings)
    plan = _plan(layers, chunks, settings)
    on_host = [number >= gpu_layers for number, spans in enumerate(chunks) for _ in spans]
    return plan.pinned_bytes(on_host) + norm_bytes(len(layers))


def _chunks(layers: Sequence[LayerState], settings: CpuSettings) -> list[list[Segment]]:
    size = settings.chunk_elements
    return [
        layer.layout.chunks(layer.begin, layer.end, size) if layer.form.optimizer is None else []
        for layer in layers
    ]


def _plan(
    layers: Sequence[LayerState], chunks: Sequence[Sequence[Segment]], settings: CpuSettings
) -> SlotPlan:
    gradient_bytes: list[int] = []
    outgoing_bytes: list[int] = []
    for layer, spans in zip(layers, chunks, strict=True):
        for span in spans:
            length = span.end - span.begin
            gradient_bytes.append(length * layer.gradient_dtype.itemsize)
            outgoing_bytes.append(length * span.dtype.itemsize)
    return plan_slots(gradient_bytes, outgoing_bytes, keeps_pending=not settings.direct)


def native_state(layer: LayerState) -> _C.StateArrays:
    """The addresses of a layer's state, on whichever side it is."""
    return native_arrays(*layer.state, layer.form.seed)


def _native_chunk(layer: LayerState, span: Segment, slot_class: int) -> _C.Chunk:
    return _C.Chunk(
        n=span.end - span.begin,
        shard_offset=span.begin - layer.begin,
        weights=layer.storage.address(span.begin, span.end),
        weights_dtype=_C.DType.bfloat16_away if layer.form.rounds_away else _NATIVE[span.dtype],
        group=span.group,
        slot_class=slot_class,
        **({"weights_on_host": True} if layer.storage.on_host else {}),
        runs=[
            _C.MomentRun(run.begin - span.begin, run.rounding.parameter, run.rounding.first_index)
            for run in layer.form.update_runs(layer.layout, span.begin, span.end)
            if run.rounding is not None
        ],
    )
