"""Adam in plain torch: the slow twin that the CPU kernel is tested against.

Adam is algorithm 1 of Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015,
arXiv:1412.6980); decoupled decay is algorithm 2 of Loshchilov and Hutter, "Decoupled Weight Decay
Regularization" (ICLR 2019, arXiv:1711.05101), with the decay multiplied by the learning rate as
torch.optim.AdamW does. With g the scaled gradient and t the step:

    L2:         g  = g + weight_decay * p          decoupled:  p = p * (1 - lr * weight_decay)
    moments:    m' = beta1 * m + (1 - beta1) * g               v' = beta2 * v + (1 - beta2) * g^2
    correction: m^ = m' / (1 - beta1^t)                        v^ = v' / (1 - beta2^t)
    step:       p' = p - lr * m^ / (sqrt(v^) + eps)

Also the rounding of moments that are stored in bf16 or in 8-bit codes, with integers in NumPy
(docs/internals.md, "Moments in fewer bytes").
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hytrain.kernels.cpu_adam import Gradient
from hytrain.kernels.moments import MOMENT_BLOCK, EightBit, Moment, Rounding, rounding_key

__all__ = [
    "AdamState",
    "adam_step_float32",
    "adam_step_float64",
    "copy_away_from_zero",
    "random_bits",
    "read_moments",
    "stored_moments",
]

_Floats = NDArray[np.float32]
_Words = NDArray[np.uint32]


class AdamState(NamedTuple):
    """Master weights and moments, n elements each, of one dtype."""

    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


def adam_step_float64(state: AdamState, gradient: Gradient) -> AdamState:
    """Makes one step in float64: exact, as far as fp32 can tell.

    Args:
        state: Any floating dtype; not modified.
        gradient: Its tensor may be of any floating dtype; its scale is rounded to fp32 as the
            kernel's argument is, everything else is exact.

    Returns:
        New float64 tensors.
    """
    return _adam_step(state, gradient, torch.float64)


def adam_step_float32(state: AdamState, gradient: Gradient) -> AdamState:
    """Makes one step in fp32 with separate roundings: close to the kernel, which fuses some.

    Args and result as for ``adam_step_float64``, in fp32.
    """
    return _adam_step(state, gradient, torch.float32)


def _adam_step(state: AdamState, gradient: Gradient, dtype: torch.dtype) -> AdamState:
    hyper = gradient.hyper
    p, m, v = (tensor.to(dtype) for tensor in state)
    scale = torch.tensor(gradient.scale, dtype=torch.float32).to(dtype)
    g = gradient.tensor.to(dtype) * scale
    if hyper.decoupled_decay:
        p = p * (1.0 - hyper.lr * hyper.weight_decay)
    else:
        g = g + hyper.weight_decay * p
    m = m + (1.0 - hyper.beta1) * (g - m)
    v = hyper.beta2 * v + (1.0 - hyper.beta2) * g * g
    correction1 = 1.0 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1.0 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    denominator = v.sqrt() / math.sqrt(correction2) + hyper.eps
    return AdamState(p - (hyper.lr / correction1) * (m / denominator), m, v)


def copy_away_from_zero(p: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to the nearest bf16, ties away from zero: by distances, in float64."""
    bits = p.numpy().view(np.uint32)
    sign, magnitude = bits & np.uint32(0x80000000), bits & np.uint32(0x7FFFFFFF)
    lower = magnitude & np.uint32(0xFFFF0000)
    upper = lower + np.uint32(0x10000)  # beyond the largest finite value: infinity
    with np.errstate(invalid="ignore"):  # from NaNs and infinities, which are handled below
        value, below = (x.view(np.float32).astype(np.float64) for x in (magnitude, lower))
        # In rounding, infinity stands for the next power of two.
        above = np.where(upper >= 0x7F800000, 2.0**128, upper.view(np.float32).astype(np.float64))
        rounded = np.where(value - below < above - value, lower, upper)
    rounded = np.where(magnitude >= 0x7F800000, lower, rounded)
    rounded = np.where(magnitude > 0x7F800000, np.uint32(0x7FC00000), rounded) | sign
    return torch.from_numpy((rounded >> 16).astype(np.uint16)).view(torch.bfloat16)


# ---- moments in fewer bytes ----


class _Code(NamedTuple):
    """The code of a magnitude: numbers of mantissa and exponent bits (``moments_kernel.inl``)."""

    mantissa: int
    exponent: int

    @property
    def shift(self) -> int:
        return 23 - self.mantissa

    @property
    def offset(self) -> float:
        return 2.0 ** (1 - 2**self.exponent)


_M_CODE, _V_CODE = _Code(4, 3), _Code(4, 4)


def random_bits(rounding: Rounding, step: int, n: int) -> _Words:
    """The 32 random bits of each of n elements, from its index and the key (see the kernels)."""
    index = np.arange(n, dtype=np.uint64) + np.uint64(rounding.first_index)
    high = (index >> np.uint64(32)).astype(np.int64)
    low = index.astype(np.uint32)
    keys = np.zeros(n, dtype=np.uint32)
    for value in np.unique(high):
        keys[high == value] = rounding_key(rounding, step, int(value))
    start = _lowbias32((low // np.uint32(MOMENT_BLOCK)) ^ keys)
    factor = _lowbias32(low % np.uint32(MOMENT_BLOCK) + np.uint32(1)) | np.uint32(1)
    h = start * factor
    return h ^ (h >> np.uint32(16))


def _lowbias32(h: _Words) -> _Words:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def stored_moments(
    m: torch.Tensor, v: torch.Tensor, kind: torch.dtype, rounding: Rounding, step: int
) -> tuple[Moment, Moment]:
    """Returns both moments as step ``step`` stores them.

    Args:
        m: fp32, n elements, before rounding; likewise ``v``.
        v: not negative.
        kind: torch.bfloat16, or torch.uint8 for codes.
        rounding: what the random bits depend on, besides the step.
        step: number of the step.
    """
    random = random_bits(rounding, step, m.numel())
    if kind == torch.bfloat16:
        return _to_bf16(m, random & np.uint32(0xFFFF)), _to_bf16(v, random >> np.uint32(16))
    signed = m.numpy().view(np.uint32) >> np.uint32(24) & np.uint32(0x80)
    m_random = random >> np.uint32(32 - _M_CODE.shift)
    v_random = random & np.uint32(2**_V_CODE.shift - 1)
    return (
        _to_codes(np.abs(m.numpy()), signed, m_random, _M_CODE, least=0),
        _to_codes(v.numpy(), np.zeros_like(signed), v_random, _V_CODE, least=1),
    )


def read_moments(m: Moment, v: Moment) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both moments in fp32, as the next step reads them; for codes, whole blocks."""
    if isinstance(m, torch.Tensor) and isinstance(v, torch.Tensor):
        return m.float(), v.float()
    if not (isinstance(m, EightBit) and isinstance(v, EightBit)):
        raise TypeError("the moments differ in kind")
    m_codes, v_codes = (_interleaved(moment.codes.numpy(), (16, 4)) for moment in (m, v))
    magnitude = _from_codes(m_codes & np.uint8(0x7F), m.exponents.numpy(), _M_CODE)
    second = _from_codes(v_codes, v.exponents.numpy(), _V_CODE)
    signed = np.where(m_codes >= 0x80, -magnitude, magnitude)
    return torch.from_numpy(signed), torch.from_numpy(second)


def _interleaved(codes: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The order of a block's elements from that of its bytes (16, 4), or the reverse (4, 16)."""
    return codes.reshape(-1, *shape).transpose(0, 2, 1).reshape(-1)


def _to_bf16(value: torch.Tensor, random: _Words) -> torch.Tensor:
    """Rounds away from zero with the lower half's probability; finite values stay finite."""
    bits = value.numpy().view(np.uint32).astype(np.int64)
    magnitude = bits & 0x7FFFFFFF
    up = np.minimum(magnitude + random, 0x7F7FFFFF)
    rounded = np.where(magnitude >= 0x7F800000, magnitude, up) | bits & 0x80000000
    return torch.from_numpy((rounded >> 16).astype(np.uint16)).view(torch.bfloat16)


def _to_codes(
    magnitude: _Floats, sign: _Words, random: _Words, code: _Code, *, least: int
) -> EightBit:
    n = magnitude.size
    num_blocks = -(-n // MOMENT_BLOCK)
    padded = np.zeros(num_blocks * MOMENT_BLOCK, dtype=np.float32)
    padded[:n] = magnitude
    largest = padded.reshape(num_blocks, MOMENT_BLOCK).view(np.uint32).max(axis=1, initial=0)
    # The least exponent with which the largest, plus the offset, is at most the last code.
    most = int((1.0 - 2.0**-code.mantissa - code.offset) * 2**23)
    exponents = (largest.astype(np.int64) + (2**23 - 1 - most)) >> 23
    exponents[exponents >= 254] = 255
    each = np.repeat(exponents, MOMENT_BLOCK)[:n]
    has_codes = (each > 0) & (each < 255)
    scaled = np.ldexp(np.where(has_codes, magnitude, 0.0).astype(np.float64), 127 - each)
    y = (scaled + code.offset).astype(np.float32).view(np.uint32)
    zero = int(np.float32(code.offset).view(np.uint32)) >> code.shift
    codes = ((y.astype(np.int64) + random) >> code.shift) - zero
    codes = np.where(magnitude > 0, np.maximum(codes, least), codes)
    whole = np.zeros(padded.size, dtype=np.uint8)
    whole[:n] = np.where(has_codes, codes | sign, 0)
    return EightBit(
        torch.from_numpy(_interleaved(whole, (4, 16))),
        torch.from_numpy(exponents.astype(np.uint8)),
    )


def _from_codes(codes: NDArray[np.uint8], exponents: NDArray[np.uint8], code: _Code) -> _Floats:
    offset_bits = int(np.float32(code.offset).view(np.uint32))
    y = ((codes.astype(np.uint32) << np.uint32(code.shift)) + np.uint32(offset_bits)).view(
        np.float32
    )
    each = np.repeat(exponents.astype(np.int64), MOMENT_BLOCK)[: codes.size]
    values = np.ldexp(y.astype(np.float64) - code.offset, each - 127)
    values = np.where(each == 0, 0.0, np.where(each == 255, np.nan, values))
    return values.astype(np.float32)
