"""Shared by the kernel tests: cases, buffers with canaries, the error bound, what they need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from support.reference_adam import AdamState, adam_step_float64

from hytrain.kernels import cpu_adam
from hytrain.kernels.cpu_adam import AdamHyper, Gradient

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ISAS = cpu_adam.available_isas()

# Around each width of register and each step of the loops, and past one block of a thread.
LENGTHS = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 100, 1023, 16384 + 5, 3 * 16384 + 129)

HYPERS = {
    "adamw": AdamHyper(lr=1e-3, weight_decay=0.1, step=3),
    "adam_l2": AdamHyper(lr=3e-4, weight_decay=0.05, step=3, decoupled_decay=False),
    "no_correction": AdamHyper(lr=1e-2, beta1=0.5, beta2=0.95, step=2, bias_correction=False),
    "first_step": AdamHyper(lr=1e-3, eps=1e-6, step=1),
    "no_momentum": AdamHyper(lr=1e-3, beta1=0.0, beta2=0.0, weight_decay=0.01, step=10),
    "late": AdamHyper(lr=1e-5, weight_decay=0.1, step=1_000_000),
}

CANARY = -7.0

INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1, which runs its kernels on a CPU",
)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def placed(values: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of a flat tensor, `offset` elements after the start of an allocation of canaries."""
    home = torch.full((offset + values.numel() + 64,), CANARY, dtype=values.dtype)
    view = home[offset : offset + values.numel()]
    view.copy_(values)
    return view


def canaries_intact(view: torch.Tensor) -> bool:
    """Whether nothing outside a tensor made by `placed` was written."""
    storage = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage())
    begin = view.storage_offset()
    end = begin + view.numel()
    return bool((storage[:begin] == CANARY).all() and (storage[end:] == CANARY).all())


@dataclass
class Case:
    """State and two gradients of n elements, each tensor misaligned by its own offset."""

    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    previous: torch.Tensor
    current: torch.Tensor

    @property
    def state(self) -> AdamState:
        return AdamState(self.p, self.m, self.v)

    def clone(self) -> Case:
        return Case(*(t.clone() for t in (self.p, self.m, self.v, self.previous, self.current)))


def make_case(n: int, dtype: torch.dtype, *, offset: int = 0, seed: int = 0) -> Case:
    """Random values over several orders of magnitude, as training has them."""
    rng = torch.Generator().manual_seed(seed + 1000 * n)

    def spread(low: float, high: float) -> torch.Tensor:
        return 10.0 ** (torch.rand(n, generator=rng) * (high - low) + low)

    def normal() -> torch.Tensor:
        return torch.randn(n, generator=rng)

    tensors = (
        normal() * spread(-3, 0),
        normal() * spread(-4, 0),
        spread(-8, 0),
        (normal() * spread(-3, 0)).to(dtype),
        (normal() * spread(-3, 0)).to(dtype),
    )
    return Case(*(placed(t, offset * (index + 1)) for index, t in enumerate(tensors)))


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Runs the body with one instruction set."""
    before = cpu_adam.active_isa()
    cpu_adam.set_isa(name)
    try:
        yield
    finally:
        cpu_adam.set_isa(before)


U = 2.0**-24  # half an ulp of 1: the largest relative error of one fp32 rounding


def error_bound(state: AdamState, gradient: Gradient) -> AdamState:
    """Bound, elementwise, on |kernel - float64 reference| after one step.

    Follows the kernel's operations: each result carries the errors of its inputs plus U times its
    size for its own rounding, and each fp32 constant carries U. The factor 1.01 covers the
    products of errors, the 2^-140 results that underflow.
    """
    h = gradient.hyper
    exact = adam_step_float64(state, gradient)
    p, m, v = (t.double() for t in state)
    scaled = gradient.tensor.double() * float(torch.tensor(gradient.scale, dtype=torch.float32))
    l2 = 0.0 if h.decoupled_decay else h.weight_decay
    decay = 1.0 - h.lr * h.weight_decay if h.decoupled_decay else 1.0
    correction1 = 1.0 - h.beta1**h.step if h.bias_correction else 1.0
    correction2 = 1.0 - h.beta2**h.step if h.bias_correction else 1.0
    g = scaled + l2 * p
    g_error = U * scaled.abs()
    if l2 != 0.0:
        g_error += U * ((l2 * p).abs() + g.abs())

    m_error = (1 - h.beta1) * (g_error + 2 * U * (g - m).abs()) + U * exact.m.abs()

    square = (1 - h.beta2) * g * g
    v_error = 2 * (1 - h.beta2) * g.abs() * g_error + 2 * U * (square + h.beta2 * v) + U * exact.v

    root = exact.v.sqrt()
    tiny = torch.finfo(torch.float32).tiny
    root_error = v_error / (2 * root).clamp(min=tiny) + U * root
    denominator = root / correction2**0.5 + h.eps
    denominator_error = (root_error + U * root) / correction2**0.5 + U * (h.eps + denominator)
    ratio = exact.m / denominator
    ratio_error = m_error / denominator + ratio.abs() * (denominator_error / denominator + U)
    step_size = h.lr / correction1
    p_error = step_size * (ratio_error + U * ratio.abs()) + 2 * U * (p * decay).abs()
    p_error += U * exact.p.abs()
    return AdamState(*(1.01 * error + 2.0**-140 for error in (p_error, m_error, v_error)))


def ulp(x: torch.Tensor) -> torch.Tensor:
    """Spacing of fp32 at each element of x, as float64."""
    _, exponent = torch.frexp(x.double().abs().clamp(min=torch.finfo(torch.float32).tiny))
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - 24)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, a NaN being equal to any NaN (its payload is the CPU's affair)."""
    as_int = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(as_int) == b.view(as_int)) | (a.isnan() & b.isnan())).all())
