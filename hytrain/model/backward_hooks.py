"""Being told when a backward comes to what a module has returned."""

from __future__ import annotations

from collections.abc import Callable

import torch


def computed(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, if that was computed; else itself."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def before_backward(tensor: torch.Tensor, function: Callable[[object], None]) -> None:
    """Calls it when backward is about to go through what computed the tensor.

    A hook of the tensor would not be called where the tensor is a view (what a linear layer returns
    may be one) and is written to afterwards: backward leaves the view out then. It does not leave
    out the function that computed the base.

    Args:
        tensor: has a gradient.
        function: called with what the hook is given; several are called in the order of their
            registration.
    """
    node = computed(tensor).grad_fn
    if node is None:
        tensor.register_hook(function)
    else:
        node.register_prehook(function)
