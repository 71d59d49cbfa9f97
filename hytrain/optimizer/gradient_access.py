"""Gradients of a step that is not final: they can be read, written and dropped until step()."""

from __future__ import annotations

import logging

import torch

from hytrain.model.layer_state import LayerState
from hytrain.optimizer.layer_gradient import Progress
from hytrain.optimizer.pass_tracker import PassTracker

logger = logging.getLogger(__name__)


class GradientAccess:
    """What can be done to gradients between backward and step."""

    def __init__(self, passes: PassTracker) -> None:
        self.passes = passes
        self._pipeline = passes.pipeline
        self._collector = passes.collector
        self._has_warned_of_drop = False

    def read_gradient(self, state: LayerState) -> torch.Tensor:
        """A copy of this rank's shard of a layer's gradient, as step() would apply it.

        A collective, after :meth:`PassTracker.withdraw_updates`. Summed over micro-batches and
        ranks, not averaged over ranks, not clipped.
        """
        gradient = self._collector.layers[state.index]
        is_reduced = gradient.progress is Progress.REDUCED
        shard = gradient.reduced_shard if is_reduced else self._reduce(state)
        assert shard is not None
        # Made on the communication stream: without this wait the caller could read half a sum.
        self._pipeline.streams.compute_waits_for_communication()
        return shard.clone() if is_reduced else shard

    def own_gradient(self, state: LayerState) -> torch.Tensor:
        """This rank's shard of a layer's gradient, to be written into; see :meth:`read_gradient`.

        A collective, after :meth:`PassTracker.withdraw_updates`.
        """
        gradient = self._collector.layers[state.index]
        if gradient.progress is not Progress.REDUCED:
            gradient.reduced_shard = self._reduce(state)
            gradient.release()
        assert gradient.reduced_shard is not None
        # Without this wait the caller could write to it before the reduction does.
        self._pipeline.streams.compute_waits_for_communication()
        return gradient.reduced_shard

    def _reduce(self, state: LayerState) -> torch.Tensor:
        """What there is of a layer's gradient, reduced; it stays where it is."""
        gradient = self._collector.layers[state.index]
        unreduced_grad = gradient.whole(self._pipeline.streams.device)
        with self._pipeline.reducing():
            shard = self.passes.reducer.reduce(state, unreduced_grad)
            if gradient.reduced_shard is not None:
                self._pipeline.add(shard, gradient.reduced_shard)
        return shard

    def drop(self) -> None:
        """Drops the gradients of this step so far: those of all micro-batches since the last step.

        A collective, where there are any. Where step() follows without another backward, it is
        skipped: nothing is updated. (DeepSpeed's stages drop some of them or none.)

        Raises:
            ConfigError: a backward is running, or updates are committed directly and have begun.
        """
        # Called at the end of every step, when reads of weights are reported. No weight is read
        # here, and the report would cost microseconds a parameter.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for layer in self._collector.layers:
                for slot in layer.layout.slots:
                    slot.parameter.grad = None
        if self.passes.open_step.has_gradients:  # not after every step
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.passes.withdraw_updates("zero_grad()")
        if not self.passes.open_step.has_gradients:
            return  # they were an aborted backward's
        self.passes.collectives.meet("zero_grad() with gradients of a step")
        # Where updates are committed directly the rest of a step's last backward would be, too.
        if not (self.passes.open_step.begun and self._pipeline.norm.settings.direct):
            self.passes.end_micro_batch()
        self.passes.timer.invalidate()
        self.passes.discard_gradients()
        self.passes.open_step.drop()
        if not self._has_warned_of_drop and self.passes.collectives.rank == 0:
            logger.warning(
                "zero_grad() between backward and step has dropped the gradients of this step's "
                "micro-batches so far (said once); DeepSpeed's ZeRO keeps them in most stages"
            )
        self._has_warned_of_drop = True
