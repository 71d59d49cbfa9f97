"""Lets tests that make their tensors on the CPU train on a GPU: inputs follow the module.

Where DeepSpeed's accelerator is a GPU, engines put their models there. Batches then go where the
called module's weights are, and torch's comparisons are made on the CPU. What cannot be seen on a
GPU is marked ``cpu``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_ORIGINALS = (nn.Module.__call__, torch.equal, torch.testing.assert_close)


@functools.wraps(_ORIGINALS[0])
def _call(module: nn.Module, *inputs: Any, **keywords: Any) -> Any:
    weight = next(module.parameters(), None)
    if weight is not None and weight.is_cuda:
        leaves = pytree.tree_leaves((inputs, keywords))
        # Only then: a module within the model may change lists of its arguments, not copies.
        if any(isinstance(leaf, torch.Tensor) and not leaf.is_cuda for leaf in leaves):
            move = functools.partial(torch.Tensor.to, device=weight.device)
            inputs, keywords = pytree.tree_map_only(torch.Tensor, move, (inputs, keywords))
    return _ORIGINALS[0](module, *inputs, **keywords)


def _on_the_cpu(compare: Callable[..., Any]) -> Callable[..., Any]:
    def compared(actual: Any, expected: Any, **keywords: Any) -> Any:
        actual, expected = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().cpu(), (actual, expected)
        )
        return compare(actual, expected, **keywords)

    return compared


def follow_modules(active: bool) -> None:
    """Changes torch for the tests that follow, or changes it back."""
    call, equal, close = _ORIGINALS
    if active:
        call, equal, close = _call, _on_the_cpu(equal), _on_the_cpu(close)
    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.equal, torch.testing.assert_close = equal, close
