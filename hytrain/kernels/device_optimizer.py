"""Optimizers that update on the device with state that may be kept on the host.

What such an update needs of an optimizer is a :class:`DeviceOptimizer`; Muon is one
(``hytrain.kernels.muon``), others are registered by :func:`register_optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hytrain.errors import ConfigError

Update = Callable[
    [torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor, Any, torch.nn.Parameter], None
]


@dataclass(frozen=True, slots=True)
class DeviceOptimizer:
    """An optimizer as a streamed update knows it.

    Attributes:
        states: names of its state tensors, one or two, each with the parameter's elements. They
            begin at zero and are kept in fp32, or bf16 if "hytrain.moments" says so.
        read: (parameter group, number of the step from 1) -> what ``update`` is given of the
            group; called once a step, a ValueError ends the step.
        update: (weight, states, gradient, what was read, parameter) -> None: makes a step in place.
            All tensors are fp32, on the device and of one shape; the gradient is unscaled and
            clipped. The parameter is there for its attributes, not for its values.
        whole_matrices: ``update`` is given whole parameters, or whole matrices of one with three
            dimensions; else a run of elements, 1-D.
    """

    states: tuple[str, ...]
    read: Callable[[Mapping[str, Any], int], Any]
    update: Update
    whole_matrices: bool = False


_registered: dict[type, DeviceOptimizer] = {}


def register_optimizer(kind: type[torch.optim.Optimizer], optimizer: DeviceOptimizer) -> None:
    """Lets engines train with an optimizer of this class, whose ``step`` is never called.

    Args:
        kind: exactly the class of what :func:`hytrain.initialize` is given, or what "optimizer"
            makes.
        optimizer: its states and update.

    Raises:
        ConfigError: it has no states, more than two, or one named "fp32".
    """
    if not 1 <= len(optimizer.states) <= 2 or "fp32" in optimizer.states:
        raise ConfigError(
            f"the optimizer for {kind.__name__} has the states {optimizer.states}: give one or two "
            'names, none of them "fp32", which is the master weight'
        )
    _registered[kind] = optimizer


def registered(kind: type) -> DeviceOptimizer | None:
    """What was registered for a class, if anything."""
    return _registered.get(kind)
