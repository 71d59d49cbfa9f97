"""The update pipeline: reduced gradients go in, new weights come out, layer by layer.

It carries out decisions and makes none: which layers are where, what the clip coefficient is and
when a step is final are decided elsewhere. docs/internals.md has the life of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from hytrain import _C
from hytrain.comm.collectives import ShardCollectives
from hytrain.errors import ConfigError
from hytrain.formats.trace_file import WAITS_FOR_ROOM
from hytrain.kernels.clipping import ClipForecast, GradientNorm, Outcome
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.model.layer_state import LayerState
from hytrain.offload.cpu_updater import CpuUpdater, native_record
from hytrain.offload.device_update import DeviceUpdate, UpdateObserver
from hytrain.offload.exposure import ExposureMeter
from hytrain.offload.gradient_room import GradientRoom
from hytrain.offload.mover import LayerMover
from hytrain.offload.streamed_update import StreamedUpdate
from hytrain.offload.streams import Streams
from hytrain.offload.update_groups import LIMITS, GroupLimits
from hytrain.trace.recorder import Recorder

_IN_LINE = nullcontext()
"""The context of reductions on a single rank: they stay on the compute stream."""


class UpdatePipeline:
    """Carries every layer's gradient to its update and its new weights to the next forward."""

    def __init__(
        self,
        layers: Sequence[LayerState],
        cpu: CpuUpdater,
        norm: GradientNorm,
        streams: Streams,
        collectives: ShardCollectives,
        group_limits: GroupLimits = LIMITS,
    ) -> None:
        self.layers = list(layers)
        self.cpu = cpu
        self.norm = norm
        self.streams = streams
        self.exposure = ExposureMeter(streams)
        self._collectives = collectives
        self._direct = norm.settings.direct
        self.mover = LayerMover(cpu, streams)
        self._device_update = DeviceUpdate(self.layers, streams, self.mover, group_limits)
        self.streamed = StreamedUpdate(self.layers, streams)
        self.updates_leave_room = False
        """Whether updates on the device leave room for other kernels there, at some cost to
        themselves. In many models the host waits for the first kernels of forward to see which
        mask they need: in launch-bound steps it launches nothing until then."""
        self.room = GradientRoom(self.layers, cpu, streams)
        self.observer: UpdateObserver | None = None
        """The observer of every update on the device, for measuring."""
        self.trace: Recorder | None = None
        """The recorder of waits and of updates on the device; None while no step is recorded."""
        self.is_torn = False
        """Whether the last step failed midway: some layers have made it and others have not."""
        self.overwrites = 0
        """How many times all weights have been overwritten."""
        for layer in self.layers:
            layer.update.gradient_ready = streams.new_event()
        self._unscale = 1.0
        self._scale = torch.zeros(2, dtype=torch.float32, device=streams.device)
        """(scale, skip flag) for updates on the device with direct commit, without a decision."""
        self._scale_of: float | None = None
        self._forecast = ClipForecast()
        self._hyper: tuple[AdamHyper, ...] = ()
        self._record = native_record(1.0, ())

    # -- backward ------------------------------------------------------------------------------

    @property
    def num_gpu_layers(self) -> int:
        """The number of layers whose state is on the device, or on its way there."""
        return [layer.placement for layer in self.layers].count("gpu")

    @property
    def waiting_on_device(self) -> int:
        """Bytes of gradients on the device that updates there wait to read, or are reading."""
        return self._device_update.waiting_bytes + self.streamed.waiting_bytes

    def begin_step(
        self, unscale: float, hyper: tuple[AdamHyper, ...], *, hold: bool = False
    ) -> None:
        """Prepares for the first gradient of a step.

        Args:
            unscale: the factor that undoes loss scaling and summation over ranks; the clip
                coefficient is taken as 1 until it is known.
            hyper: the present hyper-parameters, one per parameter group.
            hold: whether gradients leave the device but overwrite no weights before the step is
                final.
        """
        self.streamed.fit_buffers()
        self._unscale = unscale
        self._hyper = hyper
        self._record = native_record(unscale, hyper)
        if self._direct and self._scale_of != unscale:
            # A new tensor: updates of the last step may still read the old one. A kernel fills it:
            # a copy from the host would wait for compute.
            self._scale, self._scale_of = torch.zeros_like(self._scale), unscale
            self._scale[:1].fill_(unscale)
        hold = hold or self._forecast.is_clipped
        self.cpu.begin_step(-1.0 if hold else self.norm.settings.sum_limit(unscale))

    def reducing(self) -> AbstractContextManager[None]:
        """Returns the context in which gradients are reduced, summed and measured.

        On several ranks it is the communication stream, beside backward. The worker and updates on
        the device have events to wait for what is made here; compute goes on with the layers below.
        """
        if self._collectives.world_size == 1:
            return _IN_LINE
        return self.streams.on_communication()

    def reduce(self, layer: LayerState, flat: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of a layer's gradient, summed over ranks.

        Must be called within :meth:`reducing`. ``flat``: the whole layer's local gradient; its
        memory is released when possible.
        """
        shard = self.streams.empty_on_communication(layer.sizes[self._collectives.rank], flat.dtype)
        self._collectives.reduce_scatter(flat, layer.sizes, shard, layer.name)
        # The caller drops it: backward must not write its next gradients there before it is read.
        self.streams.used_on_communication(flat)
        return shard

    def add(self, shard: torch.Tensor, held: torch.Tensor) -> None:
        """Adds an earlier reduced gradient to this one; to be called within :meth:`reducing`."""
        shard.add_(held)
        # The caller drops it, too, before the sum has been computed.
        self.streams.used_on_communication(held)

    def send(
        self, layer: LayerState, gradient: torch.Tensor, squares: torch.Tensor | None = None
    ) -> None:
        """Takes a layer's final reduced gradient, on the stream that made it.

        Its update may begin at once. The pipeline owns the gradient from here on.

        ``squares``: partial sums of its squares, if they are known.
        """
        # Taken now if the worker reads the sum before the step's end, or if it runs beside
        # backward, on the communication stream.
        is_measured = layer.placement == "cpu" or self._collectives.world_size > 1
        layer.update.send(gradient, is_measured=is_measured or squares is not None)
        if squares is not None:
            self.norm.add_up(layer.index, squares)
        elif is_measured:
            self.norm.measure([layer.index], [gradient])
        # One event covers the gradient and its norm: without it the copy to the host could read
        # either before the reduction, or the sum of squares, has written it. It comes before the
        # job, because a wait on an event that is not recorded for this step is no wait. The update
        # on the device waits for all of the stream instead.
        if layer.placement == "cpu":
            self.streams.record_compute(layer.update.gradient_ready)
            self.cpu.send(layer, self.norm.address(layer.index), self._record)
            # From here the worker may write new weights at any time: reads must wait first.
            layer.update.overwrite()
        elif self._direct and layer.form.optimizer is None:
            group = self._device_update.whole_group(layer)
            if group:
                self._measure(group)
                for one in group:
                    one.update.measure()
                self._update_on_device(self._hyper, group)
        if self.cpu.unfetched:
            self.cpu.release_fetched()

    def wait_for_room(self, layer: LayerState) -> None:
        """Waits for room before a pass goes on from a layer; see :meth:`GradientRoom.wait`."""
        if self.trace is None:
            self.room.wait()
            return
        with self.trace.waiting(layer.index, WAITS_FOR_ROOM):
            self.room.wait()

    # -- the end of a step ---------------------------------------------------------------------

    def launch_outcome(self) -> None:
        """Launches the decision on the device; for updates there the host need not wait for it."""
        if self._collectives.world_size > 1:
            # The sums of squares are made on the communication stream: without this wait the norm
            # could miss the last layers. It is also what orders updates on the device after the
            # reductions, since the update stream waits for compute only.
            self.streams.compute_waits_for_communication()
        self._measure(self.layers)
        self.norm.launch_decision(self._unscale)

    def _measure(self, layers: Sequence[LayerState]) -> None:
        """Computes the sums of squares that are still missing, in few launches."""
        numbers: list[int] = []
        gradients: list[torch.Tensor] = []
        for layer in layers:
            if not layer.update.is_measured:
                assert layer.update.gradient is not None
                numbers.append(layer.index)
                gradients.append(layer.update.gradient)
        if numbers:
            self.norm.measure(numbers, gradients)

    def finish_step(self, hyper: tuple[AdamHyper, ...]) -> Outcome | None:
        """Makes the step final, or skips it.

        Args:
            hyper: the present hyper-parameters; if they changed since backward began, layers are
                previewed once more.

        Returns:
            The outcome; None with direct commit, as the host has not waited for the device.

        Raises:
            ConfigError: hyper-parameters changed and updates are committed directly.
        """
        if self._direct:
            if hyper != self._hyper:
                raise ConfigError(
                    "hyper-parameters were changed between backward and step, but without "
                    "clipping and overflow check updates are committed during backward: change "
                    'them before backward, or set "gradient_clipping" or "check_grad_overflow"'
                )
            if self.streamed.layers:
                self.streamed.begin()
                self._update_streamed(hyper)
            self._after_step(skipped=False)
            return None
        self._update_on_device(hyper)
        if self.streamed.layers:
            self.streamed.begin()
        with self._collectives.waiting():
            outcome = self.norm.read_decision()
        self._forecast.note(outcome)
        if outcome.skip:
            self._drop_all()
        else:
            self.cpu.finalize(native_record(outcome.scale, hyper))
            if self.streamed.layers:
                self._update_streamed(hyper)
        self._after_step(skipped=outcome.skip)
        return outcome

    def _update_on_device(
        self, hyper: tuple[AdamHyper, ...], group: Sequence[LayerState] | None = None
    ) -> None:
        """Updates all layers on the device at the end of a step, or one group in backward."""
        self.is_torn = True  # until the last layer has made the step
        observers = [told for told in (self.observer, self.trace) if told is not None]
        update, leaves_room = self._device_update, self.updates_leave_room
        if group is None:
            update.run(hyper, self.norm.outcome, observers, leaves_room=leaves_room)
            return
        update.run_group(group, hyper, self._scale, observers, leaves_room=leaves_room)
        self.is_torn = False  # the other layers are yet to come: see is_partly_committed

    def _update_streamed(self, hyper: tuple[AdamHyper, ...]) -> None:
        """Queues streamed updates after the decision; the worker, told of it, runs beside them."""
        self.is_torn = True
        self.streamed.run(hyper, self.norm.outcome, self.trace)

    def _drop_all(self) -> None:
        """Drops the step: a layer that the worker has not begun is as if it was never sent."""
        self.streamed.skip()
        for layer in self.cpu.layers:
            if not self.cpu.cancel(layer):
                self.cpu.submit(layer, _C.Pass.drop)
            layer.update.overwrite()

    def _after_step(self, *, skipped: bool) -> None:
        self.overwrites += not skipped
        for layer in self.layers:
            # Not the property: it would be one more call per layer, which launch-bound steps feel.
            layer.update.end_step("cpu" if layer.placement == "cpu" else "gpu")
            if not skipped:
                self.weights_changed(layer)
        self.is_torn = False
        self._device_update.end_step()
        self.cpu.end_step()

    def weights_changed(self, layer: LayerState) -> None:
        """Notes that this rank's shard is the newest; all ranks may have to gather the layer."""
        # A sharded layer is gathered anew for every use.
        is_due = self._collectives.world_size > 1 and not layer.storage.is_sharded
        layer.update.make_gather_due(is_due=is_due)
        layer.storage.mark_overwritten()

    # -- withdraw ------------------------------------------------------------------------------

    def withdraw(self, layer: LayerState) -> torch.Tensor:
        """Takes back a gradient whose step was not taken; the old weights are in place again.

        Returns:
            This rank's shard of the gradient, on the device.

        Raises:
            ConfigError: updates are committed directly and cannot be taken back.
            torch.OutOfMemoryError: the device has no memory for the gradient; nothing has changed.
        """
        self._refuse_direct()
        gradient = layer.update.gradient
        if layer.updated_on == "gpu":
            assert gradient is not None
            layer.update.release_gradient()
            layer.update.withdraw()
            return gradient
        if self.cpu.cancel(layer):
            assert gradient is not None
            self._end_taking_back(layer)
            return gradient
        returned = torch.empty(
            layer.shard_size, dtype=layer.gradient_dtype, device=self.streams.device
        )
        # The copy back must come after all earlier uses of this memory on the compute stream. The
        # event is free for it: the update has begun, so the worker has queued its wait for it.
        self.streams.record_compute(layer.update.gradient_ready)
        self.cpu.submit_withdraw(layer, returned)
        self._end_taking_back(layer)
        return returned

    def _end_taking_back(self, layer: LayerState) -> None:
        # Without this wait compute could read the gradient or the old weights before they are back;
        # and a copy of the gradient to the host may be under way, which reads its memory.
        self.cpu.wait_weights(layer)
        layer.update.withdraw()
        layer.update.release_gradient()
        layer.update.wait()

    def _refuse_direct(self) -> None:
        if self._direct:
            raise ConfigError(
                "the weights are used, or another backward begins, between backward and step; "
                "without clipping and overflow check updates are committed during backward and "
                'cannot be withdrawn: set "gradient_clipping" or "check_grad_overflow", or set '
                '"gradient_accumulation_steps" to the number of backward passes in a step'
            )

    def discard(self, layer: LayerState) -> None:
        """Withdraws an update like :meth:`withdraw` but drops the gradient: it takes no memory.

        Raises:
            ConfigError: updates are committed directly and cannot be taken back.
        """
        self._refuse_direct()
        if layer.updated_on == "gpu":
            layer.update.release_gradient()
            layer.update.withdraw()
            return
        if not self.cpu.cancel(layer):
            self.cpu.submit(layer, _C.Pass.drop)
        self._end_taking_back(layer)

    @property
    def is_partly_committed(self) -> bool:
        """Whether layers may have made a step that is not final: direct commit has begun it."""
        return self._direct and any(layer.update.sent for layer in self.layers)

    # -- forward -------------------------------------------------------------------------------

    def wait(self, layer: LayerState) -> None:
        """Has the compute stream wait for a layer's newest weights before they are used."""
        if layer.update.waited:
            return
        wait = self._wait if self.trace is None else self._wait_traced
        if layer.update.gather_due:
            # All ranks gather in forward order, whichever layer this rank's forward uses first.
            for earlier in self.layers[: layer.index]:
                if earlier.update.gather_due:
                    wait(earlier)
        wait(layer)

    def _wait_traced(self, layer: LayerState) -> None:
        assert self.trace is not None
        what = "the weights that the CPU updates"
        if layer.update.updated_by == "gpu":
            what = "the update on the GPU"
        if layer.update.gather_due:
            what += ", and the other ranks' shards"
        with self.trace.waiting(layer.index, what):
            self._wait(layer)

    def _wait(self, layer: LayerState) -> None:
        # Only the wait for this rank's own update is counted, not the one for the other ranks'.
        if layer.update.updated_by == "cpu":
            with self.exposure.waiting():
                # A sharded layer's gather waits for the shard; compute waits for the gather.
                self.cpu.wait_weights(layer, by_compute=not layer.storage.is_sharded)
        elif not layer.storage.is_sharded:
            self.streams.compute_waits(layer.update.ready)
        if layer.update.gather_due:
            self._gather(layer)
            layer.update.end_gather()
        layer.update.wait()
        if self.cpu.unfetched:
            self.cpu.release_fetched()
            # Without this wait activations of this forward would not fit beside gradients that the
            # last backward has left on the device.
            if self.room.is_watching and self.room.is_short:
                self.wait_for_room(layer)

    def _gather(self, layer: LayerState) -> None:
        # After this rank's shard has arrived: without the event its old weights could be sent. No
        # wait for compute is needed: the shard's update came after the layer's gradient was
        # final, and with that after the last kernel that reads the old weights.
        with self.streams.on_communication(after=layer.update.ready):
            for begin, flat in layer.storage.parts:
                sizes = layer.sizes_within(begin, begin + flat.numel())
                self._collectives.all_gather(flat, sizes, layer.name)
        # Without this wait forward would read the other ranks' shards before they are there.
        self.streams.compute_waits_for_communication()

    def wait_all(self) -> None:
        """Calls :meth:`wait` for every layer, in the one order that all ranks follow."""
        for layer in self.layers:
            if not layer.update.waited:
                self.wait(layer)

    def flush(self) -> None:
        """Commits what is pending, so that every layer's state is that of the last step."""
        # A new copy that is still on its way would overwrite what the caller writes to weights.
        self.cpu.wait_copies()
        self.cpu.commit_pending()
        # State on the device is written on the update and copy streams: without this wait the
        # caller, on the host or on compute, could read it half written.
        self.streams.synchronize()

    def close(self) -> None:
        """Stops the worker, frees pinned memory and the state. May be called twice.

        The weights stay the model's; a reference to the engine keeps no gigabytes alive.
        """
        # In this order: until the worker has ended, it and its copies use what is freed below.
        self.cpu.close()
        self._device_update.end_step()
        self.mover.close()
        for layer in self.layers:
            layer.release()
