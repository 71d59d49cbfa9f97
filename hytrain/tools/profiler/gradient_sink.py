"""Takes gradients over by training's own hooks: into a flat buffer a layer, freed when complete.

So a measured backward has the hooks and copies that training's has, the sums of squares that come
with these, and of the host what they take; its memory holds one layer's gradient at a time, not
those of all layers.
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
    """Whom the collector gives gradients to: drops them."""

    @property
    def lacks_room(self) -> bool:
        """Nothing stays."""
        return False

    def consume(self, gradient: LayerGradient) -> None:
        """A layer's gradient is complete; nobody wants it."""
        gradient.release()
        gradient.reduced_shard = None

    def consume_part(self, gradient: LayerGradient) -> None:
        """A part of it is."""
        self.consume(gradient)

    def withdraw_gradient(self, gradient: LayerGradient) -> None:
        """More of it comes; what came before is gone, and so will this be."""


class GradientSink:
    """Hooks on the parameters of all layers, until :meth:`close`; drops what is complete."""

    def __init__(self, layers: Sequence[LayerParameters], device: torch.device) -> None:
        """Of the model's layers, with all trained parameters, on a device."""
        group_of = {id(parameter): 0 for layer in layers for _, parameter in layer.parameters}
        self._step = StepState()
        # Not a cycle: the copy of the model goes when its measurement ends.
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
        """Whether most layers' gradients come with the squares that their norm is made of."""
        layers = self._collector.layers
        return 2 * sum(layer.copier is not None for layer in layers) > len(layers)

    def begin_pass(self) -> None:
        """Backward is about to run: announced, as engine.backward() does it, layers whose
        parameters have one gradient each soon have one hook, and not one a parameter."""
        self._step.begin_backward(reduces=True)
        self._collector.begin()

    def end_pass(self) -> None:
        """Backward is over: gradients of layers with unused parameters go too."""
        self._collector.complete(consume=True)

    def abort_pass(self) -> None:
        """It has failed."""
        self._collector.discard()
        self._step.end()

    def close(self) -> None:
        """Removes the hooks. May be called twice."""
        self.abort_pass()
        self._collector.remove_hooks()
