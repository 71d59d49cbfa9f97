"""A step that is not final: its gradients can be read, written and dropped until step()."""

from __future__ import annotations

import logging

import torch

from hytrain.engine.layer_major_passes import LayerMajorPasses
from hytrain.errors import ConfigError
from hytrain.model.layer_state import LayerState

logger = logging.getLogger(__name__)


class OpenStep(LayerMajorPasses):
    """What can be done to gradients between backward and step."""

    _has_warned_of_drop = False

    def take_back(self, what: str) -> None:
        """Withdraws updates that have begun: weights and state are those of the last step.

        Not a collective, but all ranks have sent the same layers.

        Args:
            what: wants that; for the message.

        Raises:
            ConfigError: a backward is running, or updates are committed directly.
        """
        self._check_open()
        self._clean_up_aborted()
        if self.collector.in_backward or self.is_by_layer:
            raise ConfigError(f"{what} while a backward is running: call it before or after")
        if not any(state.sent for state in self.pipeline.layers):
            return
        # On every rank, also where no layer is updated by the CPU: the others raise this.
        if self.pipeline.norm.settings.direct:
            raise ConfigError(
                f"{what} between backward and step: without clipping and overflow check updates "
                "are committed during backward; call it after step(), or set "
                '"gradient_clipping" or "check_grad_overflow"'
            )
        self.timer.invalidate()
        for state in self.pipeline.layers:
            if state.sent:
                self._withdraw(state)

    def settle_state(self, what: str) -> None:
        """Master weights and moments of this rank become those of the last step.

        Not a collective: other ranks' updates are not waited for.

        Args:
            what: wants that; for the message.

        Raises:
            ConfigError: see :meth:`take_back`.
        """
        self.take_back(what)
        # A new copy that is still on its way would overwrite what is written now.
        self.pipeline.cpu.wait_copies()
        self.pipeline.cpu.commit_pending()
        self.pipeline.streams.synchronize()

    # -- gradients -------------------------------------------------------------------------------

    def read_gradient(self, state: LayerState) -> torch.Tensor:
        """A copy of this rank's shard of a layer's gradient, as step() would apply it.

        A collective, after :meth:`take_back`. Summed over micro-batches and ranks, not averaged
        over ranks, not clipped.
        """
        gradient = self.collector.layers[state.index]
        shard = gradient.held if gradient.closed else self._reduce(state)
        assert shard is not None
        self.pipeline.streams.compute_waits_for_communication()
        return shard.clone() if gradient.closed else shard

    def own_gradient(self, state: LayerState) -> torch.Tensor:
        """This rank's shard of a layer's gradient, to be written into; see :meth:`read_gradient`.

        A collective, after :meth:`take_back`.
        """
        gradient = self.collector.layers[state.index]
        if not gradient.closed:
            gradient.held = self._reduce(state)
            gradient.release()
        assert gradient.held is not None
        self.pipeline.streams.compute_waits_for_communication()
        return gradient.held

    def _reduce(self, state: LayerState) -> torch.Tensor:
        """What there is of a layer's gradient, reduced; it stays where it is."""
        gradient = self.collector.layers[state.index]
        local = gradient.whole(self.pipeline.streams.device)
        with self.pipeline.reducing():
            shard = self.pipeline.reduce(state, local)
            if gradient.held is not None:
                self.pipeline.add(shard, gradient.held)
        return shard

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this step so far: those of all micro-batches since the last step.

        A collective, where there are any. Where step() follows without another backward, it is
        skipped: nothing is updated. (DeepSpeed's stages drop some of them or none.)

        Raises:
            ConfigError: a backward is running, or updates are committed directly and have begun.
        """
        del set_to_none
        # Called at the end of every step, when nobody may read the weights unnoticed: no weight is
        # read here, and telling so costs microseconds a parameter.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for layer in self.collector.layers:
                for slot in layer.layout.slots:
                    slot.parameter.grad = None
        if self.has_gradients:  # not after every step
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.take_back("zero_grad()")
        if not self.has_gradients:
            return  # they were an aborted backward's
        self.collectives.meet("zero_grad() with gradients of a step")
        # Where updates are committed directly the rest of a step's last backward would be, too.
        if not (self._step_begun and self.pipeline.norm.settings.direct):
            self._end_micro_batch()
        self.timer.invalidate()
        self.discard_gradients()
        self._was_dropped = True
        if not self._has_warned_of_drop and self.collectives.rank == 0:
            logger.warning(
                "zero_grad() between backward and step has dropped the gradients of this step's "
                "micro-batches so far (said once); DeepSpeed's ZeRO keeps them in most stages"
            )
        self._has_warned_of_drop = True
