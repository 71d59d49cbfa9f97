"""Weights and optimizer state between steps: made current, returned, replaced."""

from __future__ import annotations

import logging
import os

import torch

from hytrain.errors import HyTrainError
from hytrain.model.layer_state import LayerState
from hytrain.model.state_format import StateFormat
from hytrain.optimizer.hyper import HyperParameters
from hytrain.optimizer.pass_tracker import PassTracker

logger = logging.getLogger(__name__)


class KeptState:
    """The part of an optimizer that outlives a step, and that checkpoints read and write."""

    def __init__(self, passes: PassTracker, hyper: HyperParameters) -> None:
        self._passes = passes
        self._process = os.getpid()
        self.hyper = hyper
        self.pipeline = passes.pipeline
        self.weights = passes.weights
        self.written = passes.written
        self.scaling = passes.scaling
        self.collectives = passes.collectives

    @property
    def layers(self) -> list[LayerState]:
        """The layers in forward order."""
        return self.pipeline.layers

    @property
    def form(self) -> StateFormat:
        """How master weights and moments are kept; those of Adam's layers, if there are any."""
        forms = [layer.form for layer in self.layers]
        return next((form for form in forms if form.optimizer is None), forms[0])

    @property
    def device(self) -> torch.device:
        """Where the training copy is."""
        return self.pipeline.streams.device

    def synchronize(self) -> None:
        """Makes all weights the newest; withdraws what was previewed but not stepped."""
        self._passes.check_open()
        for state in self.pipeline.layers:
            self._passes.before_use(state)
        # For readers on the host and on streams of their own: what has only been ordered before
        # the compute stream could still be in flight.
        self.pipeline.cpu.wait_all()
        self.pipeline.streams.synchronize()

    def come_to_rest(self) -> None:
        """Like :meth:`synchronize`; also works with states off the device, where all is at rest."""
        if not self._passes.away or self._passes.open_step.is_closed:
            self.synchronize()
        else:
            self.pipeline.streams.synchronize()

    def finish_weights(self) -> None:
        """Makes the weights that stay the model's those of the last step, before the engine ends.

        A collective, if some are not yet. A failure is only warned of.
        """
        # A forked child has none of the threads that updates would be waited for.
        if self._passes.open_step.is_closed or os.getpid() != self._process:
            return
        kept = [state for state in self.pipeline.layers if not state.storage.is_sharded]
        if all(state.update.waited and not state.update.sent for state in kept):
            return
        try:
            self.synchronize()
        except HyTrainError as error:
            logger.warning("the model's weights are not those of the last step: %s", error)

    def flush(self) -> None:
        """Like :meth:`synchronize`; also makes all master weights and moments the last step's."""
        self.synchronize()
        self.written.adopt()
        self.pipeline.flush()

    def begin_reading(self) -> None:
        """Prepares reads of the state beside training: no update of an unfinished step runs."""
        self._passes.check_open()
        if any(state.update.sent for state in self.layers):
            self.synchronize()
        self.written.adopt()

    def forget_gradients(self) -> None:
        """Prepares for new state: nothing of the step so far stays, and nothing is pending."""
        for layer in self.layers:
            layer.before_change()
        if self.pipeline.norm.settings.direct:
            # Updates are committed as they arrive; what they wrote is about to be replaced: a new
            # copy that is still on its way would overwrite that.
            self.pipeline.cpu.wait_copies()
            for layer in self.layers:
                if layer.update.sent:
                    layer.update.forget()
        self._passes.forget_step()
        self.pipeline.is_torn = False  # all of it is replaced
        self.flush()

    def publish_masters(self) -> None:
        """Makes the training copy from the master weights, on all ranks; a collective."""
        pipeline = self.pipeline
        with torch.no_grad():
            for layer in pipeline.layers:
                layer.copy_from_master()
        # The gather waits for the last update's event, not for these copies on the compute stream:
        # without this the other ranks could be sent weights that are half written.
        pipeline.streams.synchronize()
        pipeline.overwrites += 1
        for layer in pipeline.layers:
            layer.update.overwrite()
            pipeline.weights_changed(layer)
        for weights in self.weights.layers:
            if weights.frozen is not None:
                weights.frozen.storage.mark_overwritten()
        pipeline.wait_all()
        pipeline.streams.synchronize()
        self.written.ignore()  # weights that were loaded before their master weights

    def settle(self, what: str) -> None:
        """Makes master weights and moments of this rank those of the last step.

        Not a collective: other ranks' updates are not waited for.

        Raises:
            ConfigError: see :meth:`PassTracker.withdraw_updates`.
        """
        self._passes.withdraw_updates(what)
        self.written.adopt()
        for layer in self.layers:
            layer.before_change()
        self.pipeline.flush()
