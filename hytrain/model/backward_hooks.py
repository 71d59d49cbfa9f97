"""Hooks that are called when backward reaches what a module has returned."""

from __future__ import annotations

from collections.abc import Callable

import torch


def computed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the base of a view if the base was computed; else the tensor itself."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def before_backward(tensor: torch.Tensor, function: Callable[[object], None]) -> None:
    """Calls ``function`` when backward is about to go through what computed the tensor.

    A hook of the tensor would not be called if the tensor is a view (a linear layer may return one)
    that is written to afterwards: backward then leaves the view out. It does not leave out the
    function that computed the base.

    Args:
        tensor: one that gets a gradient.
        function: called with the hook's argument; several are called in the order of registration.
    """
    node = computed(tensor).grad_fn
    if node is None:
        tensor.register_hook(function)
    else:
        node.register_prehook(function)
