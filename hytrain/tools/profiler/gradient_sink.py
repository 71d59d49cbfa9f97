"""Takes gradients over by training's own hooks: into a flat buffer per layer, freed when complete.

Thus a measured backward has the same hooks, copies and sums of squares as training's, and takes as
much host time for them; its memory holds one layer's gradient at a time, not those of all layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from hytrain.model.discovery import LayerParameters
from hytrain.model.layout import lay_out
from hytrain.optimizer.gradients import GradientCollector
from hytrain.optimizer.layer_gradient import LayerGradient
from hytrain.optimizer.step_state import StepState


class _Drop:
    """Receives the collector's gradients and drops them."""

    @property
    def lacks_room(self) -> bool:
        """Always False: nothing is kept."""
        return False

    def consume(self, gradient: LayerGradient) -> None:
        """Drops a layer's complete gradient."""
        gradient.release()
        gradient.reduced_shard = None

    def consume_part(self, gradient: LayerGradient) -> None:
        """Drops a part of a layer's gradient."""
        self.consume(gradient)

    def withdraw_gradient(self, gradient: LayerGradient) -> None:
        """Does nothing: the earlier part was dropped, and what follows will be."""


class GradientSink:
    """Hooks on the parameters of all layers, until :meth:`close`; drops complete gradients."""

    def __init__(self, layers: Sequence[LayerParameters], device: torch.device) -> None:
        """``layers``: the model's, with all trained parameters."""
        group_of = {id(parameter): 0 for layer in layers for _, parameter in layer.parameters}
        self._step = StepState()
        # Weak, to avoid a cycle: the copy of the model is freed when its measurement ends.
        own = weakref.WeakMethod(self.begin_pass)

        def begin_pass() -> bool:
            begin = own()
            assert begin is not None
            begin()
            return True

        self._collector = GradientCollector(
            [
                LayerGradient(layout, layer.parameters[0][1].dtype)
                for layout, layer in zip(lay_out(layers, group_of, 1), layers, strict=True)
            ],
            device,
            self._step,
            _Drop(),
            begin_pass,
            collectives=None,
            direct=False,
        )

    @property
    def sums_squares(self) -> bool:
        """Whether most layers' gradients come with the sums of squares for their norm."""
        layers = self._collector.layers
        return 2 * sum(layer.copier is not None for layer in layers) > len(layers)

    def begin_pass(self) -> None:
        """Announces backward, as engine.backward() does.

        Thanks to that, layers whose parameters have one gradient each soon have one hook instead of
        one per parameter.
        """
        self._step.begin_backward(reduces=True)
        self._collector.begin()

    def end_pass(self) -> None:
        """Ends a pass: gradients of layers with unused parameters are dropped too."""
        self._collector.complete(consume=True)

    def abort_pass(self) -> None:
        """Ends a pass that has failed."""
        self._collector.discard()
        self._step.end()

    def close(self) -> None:
        """Removes the hooks. May be called twice."""
        self.abort_pass()
        self._collector.remove_hooks()
