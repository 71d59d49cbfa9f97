"""What the hooks on a model's modules say, turned into waits and gathers of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hytrain.errors import UnsupportedError
from hytrain.layers.state import LayerState
from hytrain.layers.weights import LayerWeights
from hytrain.optim.zero_optimizer import HyTrainZeroOptimizer


class PassGuide:
    """The owner of weights that :class:`~hytrain.layers.guards.LayerGuards` tells of every use."""

    def __init__(self, optimizer: HyTrainZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._weights = optimizer.weights

    @property
    def layers(self) -> Sequence[LayerWeights]:
        """All weights in forward order."""
        return self._weights.layers

    @property
    def gathers(self) -> bool:
        """Whether layers have to be gathered for their uses (ZeRO-3)."""
        return self._weights.is_sharded

    def begin_forward(self) -> None:
        """The model's forward begins, and is about to enter its modules."""
        optimizer, schedule = self._optimizer, self._weights.active
        optimizer.begin_forward()
        if schedule is not None and not optimizer.is_by_layer and not optimizer.is_in_graph:
            for state in optimizer.layer_states:
                if state.sent:  # what is gathered ahead must not be what a later step would make it
                    optimizer.before_use(state)
            schedule.begin("train" if torch.is_grad_enabled() else "eval")

    def end_forward(self) -> None:
        """The model's forward is over."""
        optimizer, schedule = self._optimizer, self._weights.active
        if schedule is not None and not optimizer.is_by_layer and not optimizer.is_in_graph:
            schedule.end()
        # Whatever was not used is made ready now: every rank gathers every layer, in one order,
        # and reads of parameters between forward and backward see the newest weights.
        for state in optimizer.layer_states:
            if state.sent or not state.waited:
                optimizer.before_use(state)
        optimizer.end_forward()

    def before_use(self, state: LayerState) -> None:
        """Trained weights are about to be read."""
        self._optimizer.before_use(state)

    def enter_forward(self, layers: Sequence[LayerWeights]) -> None:
        """A module that uses the layers' weights begins its forward, perhaps to recompute it."""
        optimizer, schedule = self._optimizer, self._weights.active
        for layer in layers:
            state = layer.trained
            if state is None:
                if schedule is not None:
                    schedule.use(layer.index)
                continue
            if state.sent and not optimizer.collector.in_backward:
                optimizer.before_use(state)  # withdraws
            if schedule is not None:
                optimizer.timer.wait_begins(state.index, on_cpu=state.updated_by == "cpu")
                schedule.use(state.index)
                optimizer.timer.wait_ends(state.index)
            elif not state.waited:
                optimizer.before_use(state)
        if layers[0].trained is not None:  # the time of others counts as the layer's before them
            optimizer.timer.enter(layers[0].index)

    def leave_forward(self, layers: Sequence[LayerWeights]) -> None:
        """The module's computation is queued."""
        schedule = self._weights.active
        if schedule is not None:
            schedule.begun()
            for layer in layers:
                schedule.leave(layer.index)

    def needed_in_backward(self, layers: Sequence[LayerWeights]) -> None:
        """Autograd has come to a module that uses the layers' weights."""
        schedule = self._weights.active
        if schedule is None:
            return
        if not self._optimizer.collector.in_backward:
            self._optimizer.begin_unannounced()
        for layer in layers:
            schedule.use(layer.index)

    def read_weights(self) -> None:
        """All weights are about to be read: the newest ones.

        Raises:
            UnsupportedError: they are not on this rank (ZeRO-3).
        """
        if not self._weights.are_readable:
            raise UnsupportedError(
                "under ZeRO-3 a rank has its shards of the weights only: read them on all ranks "
                "inside `with engine.gathered_parameters():`, or call engine.save_16bit_model, "
                "engine.module_state_dict or engine.fp32_state_dict, which gather them"
            )
        self._optimizer.synchronize()
