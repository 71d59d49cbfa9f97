"""Hooks on a layer's parameters: one on each, or one on that whose gradient comes last.

A call from autograd into Python takes as long as some kernels of a small model. Autograd gives the
gradients of one and the same graph in one and the same order: where a layer's last one is known,
its hook alone takes over all of them, which autograd has kept in ``parameter.grad`` until then.
Another graph may have another order: then what is there is taken, and each parameter has a hook of
its own again, for good. A gradient that comes after the layer's last one is found when the backward
has ended (:meth:`LayerHooks.left`). With several ranks each parameter keeps its hook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hytrain.model.layout import ParameterSlot
from hytrain.optimizer.layer_gradient import LayerGradient

Hook = Callable[[nn.Parameter], None]


class LayerHooks:
    """The hooks of one layer."""

    def __init__(
        self, layer: LayerGradient, each: Callable[[LayerGradient, int, ParameterSlot], Hook]
    ) -> None:
        """
        Args:
            layer: whose parameters.
            each: makes the hook of one of them, from its index.
        """
        self._each = each
        self.layer = layer
        self._parameters = [slot.parameter for slot in layer.layout.slots]
        self._handles: list[RemovableHandle] = []
        self.is_marked = False
        """One hook takes all."""
        # What autograd adds up by itself must be what the layer would have added up, in its dtype.
        self._may_be_marked = layer.together and all(
            parameter.dtype == layer.dtype for parameter in self._parameters
        )
        self._hook_each()

    def _hook_each(self) -> None:
        # Reads of weights are looked for where updates have begun; here none is read.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for index, slot in enumerate(self.layer.layout.slots):
                parameter, is_trained = slot.parameter, slot.parameter.requires_grad
                # torch refuses a hook on one that is frozen, which may be thawed.
                parameter.requires_grad_(True)
                hook = self._each(self.layer, index, slot)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                parameter.requires_grad_(is_trained)

    def mark(self, hook: Hook) -> None:
        """From the next backward on the hook is called for the parameter that came last in this.

        Nothing where a parameter of the layer came several times, or not at all.
        """
        if self.is_marked or not self._may_be_marked or set(self.layer.fired) != {1}:
            return
        self.remove()
        last = self._parameters[self.layer.last_index]
        self._handles.append(last.register_post_accumulate_grad_hook(hook))
        self.is_marked = True

    def unmark(self) -> None:
        """Each parameter has its hook again, for good; also for what is still to come."""
        self._may_be_marked = False
        if self.is_marked:
            self.remove()
            self._hook_each()
            self.is_marked = False

    def take(self) -> list[torch.Tensor | None]:
        """The gradients that autograd has kept, by parameter; it keeps them no longer."""
        # Without it reads of weights would be looked for, at microseconds a parameter.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            gradients = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
        return gradients

    def left(self) -> list[int]:
        """Parameters whose gradients autograd keeps, where one hook takes all."""
        return with_gradient(self._parameters) if self.is_marked else []

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Of the layer."""
        return self._parameters

    def remove(self) -> None:
        """Detaches from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def with_gradient(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Which of them autograd keeps a gradient of."""
    # Without it reads of weights would be looked for, at microseconds a parameter.
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return [index for index, p in enumerate(parameters) if p.grad is not None]
