"""Takes gradients over as training does: into a flat buffer a layer, each freed when it is copied.

So a measured backward has the copies that training's has, and its memory holds one layer's gradient
at a time, not those of all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from hytrain.model.discovery import LayerParameters


class _Layer:
    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.sizes = [parameter.numel() for parameter in parameters]
        self.parts: list[torch.Tensor] = []
        self.missing = len(self.sizes)

    def take(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if not self.parts:
            flat = torch.empty(sum(self.sizes), dtype=gradient.dtype, device=gradient.device)
            self.parts = list(flat.split(self.sizes))
        self.parts[index].view(gradient.shape).copy_(gradient.detach())
        parameter.grad = None
        self.missing -= 1
        if self.missing == 0:
            self.drop()

    def drop(self) -> None:
        self.parts = []
        self.missing = len(self.sizes)


class GradientSink:
    """Hooks on the parameters of all layers, until :meth:`close`."""

    def __init__(self, layers: Sequence[LayerParameters]) -> None:
        """
        Args:
            layers: of the model, with all trained parameters.
        """
        self._layers: list[_Layer] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for found in layers:
            parameters = [parameter for _, parameter in found.parameters]
            layer = _Layer(parameters)
            self._layers.append(layer)
            for index, parameter in enumerate(parameters):
                hook = partial(layer.take, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def end_pass(self) -> None:
        """Backward is over, or has failed: gradients of layers with unused parameters go too."""
        for layer in self._layers:
            layer.drop()

    def close(self) -> None:
        """Removes the hooks. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.end_pass()
