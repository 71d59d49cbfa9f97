"""Muon's update of whole matrices: momentum, made orthogonal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

from hytrain.errors import ConfigError
from hytrain.kernels.device_optimizer import DeviceOptimizer

Method = Literal["gram", "standard"]
METHODS: tuple[Method, ...] = ("gram", "standard")

_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS = 5
_RESTART = 2
"""Steps after which the product so far is applied: over more, half precision would lose it."""
_EPS = 1e-7
"""Added to the norm, so that a matrix of zeros stays zero."""


def iteration_dtype(method: Method, device: torch.device) -> torch.dtype:
    """The dtype of the products: bf16, or fp16 for "gram" on a GPU and fp32 on a CPU."""
    if method == "standard":
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def orthogonalize(matrices: torch.Tensor, method: Method = "gram") -> torch.Tensor:
    """U V' of each matrix U S V', nearly, by products of matrices alone (Newton-Schulz).

    Five steps of X <- aX + b(XX')X + c(XX')(XX')X with coefficients that lift small singular values
    fast (Jordan et al., "Muon", 2024): they end between about 0.7 and 1.2, not at 1.

    Args:
        matrices: fp32, (m, n), or (count, m, n), which are batched.
        method: "standard" iterates on the matrix, in bf16; "gram" on the smaller of its Gram
            matrices, in fp16 (Dao et al., "Gram Newton-Schulz", 2026): less work for all but
            square ones.

    Returns:
        The same shape, of :func:`iteration_dtype`.
    """
    is_tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if is_tall else matrices
    dtype = iteration_dtype(method, matrices.device)
    if method == "standard":
        x = x.to(dtype)
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + _EPS)).to(dtype)
    if method == "gram" and x.size(-2) < x.size(-1):
        x = _gram(x)
    else:
        for _ in range(_STEPS):
            x = _plus(x, _quintic(x @ x.mT), x, scale=_A)
    return x.mT if is_tall else x


def _gram(x: torch.Tensor) -> torch.Tensor:
    """Each step is a polynomial of R = XX' times X: only R and the product q of these change."""
    gram, q = x @ x.mT, None
    for step in range(_STEPS):
        if step == _RESTART:
            assert q is not None
            x = q @ x
            gram, q = x @ x.mT, None
        z = _quintic(gram)
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(_A)
        else:
            q = _plus(q, z, q, scale=_A)
        if step + 1 not in (_RESTART, _STEPS):
            half = _plus(gram, z, gram, scale=_A)
            gram = _plus(half, z, half, scale=_A)
    assert q is not None
    return q @ x


def _quintic(gram: torch.Tensor) -> torch.Tensor:
    return _plus(gram, gram, gram, scale=_B, factor=_C)


def _plus(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, scale: float, factor: float = 1
) -> torch.Tensor:
    """scale * added + factor * left @ right, in one launch and rounded once."""
    product = torch.addmm if left.dim() == 2 else torch.baddbmm
    return product(added, left, right, beta=scale, alpha=factor)


class MuonValues(NamedTuple):
    """A parameter group's learning rate, weight decay, momentum, and kind of iteration."""

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
    """Makes a step with Nesterov momentum, in place.

    Args:
        weight: fp32: a matrix, several (3-D), or a kernel of a convolution (4-D), which is a matrix
            with a row for each output.
        states: the momentum, fp32, of that shape.
        gradient: fp32, of that shape; overwritten.
        values: those of the parameter's group.
        parameter: its ``muon_num_heads``, if any, cuts a matrix's rows into that many matrices.
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
