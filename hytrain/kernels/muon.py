"""Muon's update of whole matrices: momentum, made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hytrain.errors import ConfigError
from hytrain.kernels.device_optimizer import DeviceOptimizer
from hytrain.kernels.newton_schulz import METHODS, Method, orthogonalize


class MuonValues(NamedTuple):
    """Of a parameter group: learning rate, decay of weights and momentum, kind of iteration."""

    lr: float
    weight_decay: float
    momentum: float
    method: Method


def read_group(group: Mapping[str, Any], _step: int) -> MuonValues:
    """A group's hyper-parameters as they are now.

    Raises:
        ConfigError: the momentum is not in [0, 1), or the method unknown.
    """
    momentum, method = float(group.get("momentum", 0.95)), group.get("ns_method", METHODS[0])
    if not 0.0 <= momentum < 1.0:
        raise ConfigError(f'"momentum" of Muon is {momentum}: give a number in [0, 1), as in 0.95')
    if method not in METHODS:
        raise ConfigError(f'"ns_method" of Muon is {method!r}: give {" or ".join(METHODS)}')
    decay = float(group.get("weight_decay", 0.0))
    return MuonValues(float(group["lr"]), decay, momentum, method)


def muon_step(
    weight: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
    values: MuonValues,
    parameter: torch.nn.Parameter,
) -> None:
    """A step with Nesterov momentum, in place.

    Args:
        weight: fp32: a matrix, several (3-D), or a kernel of a convolution (4-D), which is a matrix
            with a row for each output.
        states: the momentum, fp32, of that shape.
        gradient: fp32, of that shape; overwritten.
        values: of the parameter's group.
        parameter: whose ``muon_num_heads``, if it has any, cuts a matrix's rows into matrices.
    """
    (momentum,) = states
    momentum.lerp_(gradient, 1.0 - values.momentum)
    update = gradient.lerp_(momentum, values.momentum)
    heads = getattr(parameter, "muon_num_heads", None)
    if heads:
        update = update.view(heads, -1, update.size(-1))
    rows, columns = update.shape[-2:]
    if update.dim() > 3:
        update = update.flatten(1) if update.dim() == 4 else update.flatten(0, -3)
    update = orthogonalize(update, values.method)
    # The step of a wide matrix is as it is; a tall one's rows share its columns' length.
    update *= math.sqrt(max(1.0, rows / columns))
    weight.mul_(1.0 - values.lr * values.weight_decay)
    weight.add_(update.reshape(weight.shape), alpha=-values.lr)


MUON = DeviceOptimizer(("momentum_buffer",), read_group, muon_step, whole_matrices=True)
