"""Hooks that report a layer's gradients: on each of its parameters, or on the last one only.

They are on the nodes that add to ``parameter.grad``, which run after all hooks of the parameters:
what a user's hook there masks or clips is taken as the hook returns it, whenever it was registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hytrain.optimizer.autograd_task import accumulator
from hytrain.optimizer.layer_gradient import LayerGradient

Hook = Callable[[object, object], None]


class LayerHooks:
    """The hooks of one layer."""

    def __init__(self, layer: LayerGradient, each: Callable[[LayerGradient, int], Hook]) -> None:
        self._each = each
        self.layer = layer
        self.parameters = [slot.parameter for slot in layer.layout.slots]
        self.accumulators: list[Node] = []
        """Accumulation nodes of its parameters, in order; they live as long as they are here."""
        self._handles: list[RemovableHandle] = []
        self.has_single_hook = False
        """Whether one hook takes all gradients of the layer."""
        # What autograd adds up by itself must be what the layer would have added up, in its dtype.
        self._may_use_single_hook = layer.together and all(
            parameter.dtype == layer.dtype for parameter in self.parameters
        )
        self.hook_each()

    def hook_each(self) -> None:
        """Gives each parameter its hook, on the node that adds to its gradient now."""
        self.remove()
        self.has_single_hook = False
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for index, slot in enumerate(self.layer.layout.slots):
                parameter, is_trained = slot.parameter, slot.parameter.requires_grad
                # A frozen parameter, which may be thawed, has no node.
                parameter.requires_grad_(True)
                node = accumulator(parameter)
                parameter.requires_grad_(is_trained)
                self.accumulators.append(node)
                self._handles.append(node.register_hook(self._each(self.layer, index)))

    def use_single_hook(self, hook: Hook) -> None:
        """Puts a hook on the parameter that came last only, from the next backward on.

        Does nothing if a parameter of the layer came several times, or not at all.
        """
        if self.has_single_hook or not self._may_use_single_hook or set(self.layer.fired) != {1}:
            return
        self._remove_hooks()
        last = self.accumulators[self.layer.last_index]
        self._handles.append(last.register_hook(hook))
        self.has_single_hook = True

    def drop_single_hook(self) -> None:
        """Gives each parameter its hook again, for good; also for what is still to come."""
        self._may_use_single_hook = False
        if self.has_single_hook:
            self.hook_each()

    def take(self) -> list[torch.Tensor | None]:
        """Takes away the gradients that autograd has kept, by parameter."""
        # Otherwise reads of weights would be looked for, at microseconds a parameter.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            gradients = [parameter.grad for parameter in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None
        return gradients

    def left(self) -> list[int]:
        """Indices of parameters whose gradients autograd keeps: no hook has taken them."""
        return with_gradient(self.parameters)

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def remove(self) -> None:
        """Detaches from the model."""
        self._remove_hooks()
        self.accumulators.clear()


IS_READY = "ds_grad_is_ready"
"""Attribute of a parameter; False if DeepSpeed's tiles say that more of a gradient comes from the
same use. Looked up inline: a function would cost one more call for each layer of each step."""


def with_gradient(parameters: Sequence[nn.Parameter]) -> list[int]:
    """Indices of the parameters whose gradient autograd keeps."""
    # Otherwise reads of weights would be looked for, at microseconds a parameter.
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return [index for index, p in enumerate(parameters) if p.grad is not None]
