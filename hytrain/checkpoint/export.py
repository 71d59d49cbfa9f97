"""The module's weights on one rank's host, wherever the ranks keep them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hytrain.optimizer.kept_state import KeptState


def collect_module_state(
    kept: KeptState,
    module_tensors: Callable[[], Mapping[str, Any]],
    *,
    with_frozen: bool,
) -> dict[str, Any]:
    """A module's state dict under ZeRO-3, on rank 0; a collective, one layer at a time.

    ``module_tensors`` is the state dict of names, with no weights read.

    Returns:
        Name -> tensor; sharded weights on the host, tied ones as one tensor. On other ranks an
        empty dict.
    """
    kept.synchronize()
    is_first = kept.collectives.rank == 0
    copies: dict[int, torch.Tensor] = {}
    for some in kept.weights.copies_on_first(is_first, lambda x: x.parts(with_frozen=with_frozen)):
        copies.update(some)
    if not is_first:
        return {}
    state: dict[str, Any] = {}
    for name, tensor in module_tensors().items():
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and not with_frozen:
            continue
        if id(tensor) in copies:
            state[name] = copies[id(tensor)]
        else:
            state[name] = tensor.detach() if isinstance(tensor, torch.Tensor) else tensor
    return state


def shared_parameters(module: nn.Module) -> dict[str, str]:
    """Tied parameters: name -> the name under which the tensor is stored."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        stored = first.setdefault(id(parameter), name)
        if stored != name:
            shared[name] = stored
    return shared
