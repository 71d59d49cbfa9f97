"""Reduces layers' complete gradients over the ranks, and sends them to their updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.model.layer_state import LayerState
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.optimizer.engine_view import StepSettings
from hytrain.optimizer.layer_gradient import LayerGradient, Progress
from hytrain.optimizer.loss_scaling import LossScaling
from hytrain.optimizer.step_state import StepState
from hytrain.placement.manager import PlacementManager
from hytrain.trace.profiler_spans import span
from hytrain.trace.recorder import Recorder


class GradientReducer:
    """Reduces the gradients that the collector passes on, and sends or withdraws updates."""

    def __init__(
        self,
        gradients: Sequence[LayerGradient],
        pipeline: UpdatePipeline,
        collectives: ShardCollectives,
        settings: StepSettings,
        placement: PlacementManager,
        scaling: LossScaling,
        step: StepState,
    ) -> None:
        self._gradients = gradients
        self._pipeline = pipeline
        self._collectives = collectives
        self._settings = settings
        self._placement = placement
        self._scaling = scaling
        self._step = step
        self.on_reduced_gradient: Callable[[LayerState, torch.Tensor], None] | None = None
        """Observer of every final reduced gradient shard, for tests and tools."""
        self.trace: Recorder | None = None
        """Recorder of gradients; None while no step is recorded."""

    @property
    def unscale(self) -> float:
        """The factor by which step() multiplies a reduced gradient, besides clipping."""
        is_mean = self._step.sums_over_ranks or self._settings.divide_first
        return (1.0 if is_mean else self._settings.unscale) / self._scaling.scale

    @property
    def lacks_room(self) -> bool:
        """Whether the gradients of a step's last backward need memory that may not be there."""
        return self._step.begun and self._pipeline.room.is_watching

    # -- from the collector ----------------------------------------------------------------------

    def consume(self, gradient: LayerGradient) -> None:
        """Reduces a layer's complete gradient and, if updates may begin, sends it.

        Called in one order on all ranks.
        """
        state, begun = self._pipeline.layers[gradient.layout.index], self._step.begun
        if self.trace is not None and begun:
            self.trace.gradient(state.index)
        squares = gradient.squares if gradient.reduced_shard is None else None
        # One stream for reduction, norm and send: the event that send records covers all of them.
        with span(f"reduce {gradient.layout.name}"), self._pipeline.reducing():
            if gradient.unreduced_grad is not None:
                self._reduce_part(gradient, state)
            if begun:
                self._send(gradient, state, squares)
        if begun:
            self._placement.gradient(state.index)

    def consume_part(self, gradient: LayerGradient) -> None:
        """Reduces what has come of a layer's gradient into ``reduced_shard``."""
        with self._pipeline.reducing():
            self._reduce_part(gradient, self._pipeline.layers[gradient.layout.index])

    def withdraw_gradient(self, gradient: LayerGradient) -> None:
        """Takes a layer back whose gradient this backward wrongly took for complete."""
        state = self._pipeline.layers[gradient.layout.index]
        if state.update.sent:
            self._placement.timer.invalidate()
            self.withdraw(state)

    # -- reduction -------------------------------------------------------------------------------

    def _reduce_part(self, gradient: LayerGradient, state: LayerState) -> None:
        """Reduces it into ``reduced_shard``; within :meth:`UpdatePipeline.reducing`."""
        unreduced_grad = gradient.release()
        assert unreduced_grad is not None
        shard = self.reduce(state, unreduced_grad)
        if gradient.reduced_shard is not None:
            self._pipeline.add(shard, gradient.reduced_shard)
        gradient.reduced_shard = shard

    def reduce(self, state: LayerState, unreduced_grad: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a layer's gradient; within :meth:`UpdatePipeline.reducing`.

        It is the sum over ranks, of the same dtype; the mean if the settings divide first.
        Ownership of ``unreduced_grad`` passes to this call.
        """
        if self._collectives.world_size == 1:
            return unreduced_grad
        if self._settings.divide_first and not self._step.sums_over_ranks:
            unreduced_grad.mul_(self._settings.unscale)
        dtype = self._settings.communication_dtype
        if dtype is None or dtype == unreduced_grad.dtype:
            return self._pipeline.reduce(state, unreduced_grad)
        sent = unreduced_grad.to(dtype)
        # The caller drops it: backward must not write its next gradients there before it is read.
        self._pipeline.streams.used_on_communication(unreduced_grad)
        shard = self._pipeline.streams.empty_on_communication(
            state.sizes[self._collectives.rank], unreduced_grad.dtype
        )
        return shard.copy_(self._pipeline.reduce(state, sent))

    def read_gradient(self, state: LayerState) -> torch.Tensor:
        """This rank's shard of a layer's gradient, as step() would apply it, to be read only.

        A collective, after :meth:`PassTracker.withdraw_updates`. Summed over micro-batches, and
        over ranks as in :meth:`reduce`; not clipped. The gradient itself stays where it is.
        """
        gradient = self._gradients[state.index]
        shard = gradient.reduced_shard
        if gradient.progress is not Progress.REDUCED:
            unreduced_grad = gradient.whole(self._pipeline.streams.device)
            with self._pipeline.reducing():
                shard = self.reduce(state, unreduced_grad)
                if gradient.reduced_shard is not None:
                    self._pipeline.add(shard, gradient.reduced_shard)
        assert shard is not None
        # Made on the communication stream: without this wait the caller could read half a sum.
        self._pipeline.streams.compute_waits_for_communication()
        return shard

    # -- to the updates, and back ----------------------------------------------------------------

    def _send(
        self, gradient: LayerGradient, state: LayerState, squares: torch.Tensor | None = None
    ) -> None:
        """Passes a layer's final reduced gradient to the pipeline; its update may begin."""
        shard, gradient.reduced_shard = gradient.reduced_shard, None
        assert shard is not None
        if self.on_reduced_gradient is not None:
            self.on_reduced_gradient(state, shard)
        self._pipeline.send(state, shard, squares)

    def send_held(self) -> None:
        """Sends layers whose gradient was reduced by an earlier backward, or withdrawn since."""
        for gradient in self._gradients:
            state = self._pipeline.layers[gradient.layout.index]
            if not state.update.sent:
                with self._pipeline.reducing():
                    self._send(gradient, state)

    def withdraw(self, state: LayerState) -> None:
        """Takes a layer's update back; its gradient is kept for the step."""
        self._gradients[state.index].reduced_shard = self._pipeline.withdraw(state)

    def withdraw_all(self) -> None:
        """Takes back every update that has begun: weights are those of the last step."""
        for state in self._pipeline.layers:
            if state.update.sent:
                self.withdraw(state)
