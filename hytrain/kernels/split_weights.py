"""Split master weights: 16 bits beside a bf16 training copy, which together are the fp32 value.

The upper half of ``t = bits(p) + 0x8000`` is the copy, p rounded to nearest with ties away from
zero, the lower one is the *remainder*. ``p = t - 0x8000`` for every finite p and infinity; a NaN
becomes the quiet NaN of its sign (``csrc/include/hytrain/adam.h``). Here in torch, on any device.
"""

from __future__ import annotations

import torch

REMAINDER = torch.int16
"""The dtype of remainders, by which functions tell them from fp32 master weights."""
NO_REMAINDER = -(2**15)
"""Remainder of a weight that equals its training copy: 0x8000."""

_SIGN = -(2**31)
_HALF = 2**15
_NAN = 0x7FC00000 + _HALF
_PIECE = 1 << 18
"""Elements at a time: each takes some 20 bytes of temporaries, which no plan counts."""


def is_split(master: torch.Tensor) -> bool:
    """Whether these are remainders, not fp32 master weights."""
    return master.dtype == REMAINDER


def join(copy: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master weights, a new tensor on the remainder's device.

    Args:
        copy: bf16, n elements, on any device.
        remainder: int16, n elements.
    """
    joined = torch.empty(remainder.numel(), dtype=torch.int32, device=remainder.device)
    for at in range(0, remainder.numel(), _PIECE):
        part = slice(at, at + _PIECE)
        upper = copy[part].to(remainder.device).view(torch.int16).to(torch.int32) << 16
        t = upper | (remainder[part].to(torch.int32) & 0xFFFF)
        # What was written beside the remainder may be a zero: it stays one, or next to it.
        magnitude = (t & ~_SIGN).clamp_min_(_HALF).sub_(_HALF)
        joined[part] = magnitude.bitwise_or_(t & _SIGN)
    return joined.view(torch.float32)


def split(values: torch.Tensor, copy: torch.Tensor, remainder: torch.Tensor | None = None) -> None:
    """Writes the two halves of values.

    Args:
        values: n elements, of any floating dtype, on any device.
        copy: bf16, n elements, on any device; gets the upper halves.
        remainder: int16, n elements, on any device; gets the lower halves; None: they are not
            wanted.
    """
    for at in range(0, values.numel(), _PIECE):
        part = slice(at, at + _PIECE)
        bits = values[part].to(torch.float32).contiguous().view(torch.int32)
        magnitude = bits & ~_SIGN
        nan = (bits & _SIGN) | _NAN
        t = torch.where(magnitude > 0x7F800000, nan, (bits & _SIGN) | (magnitude + _HALF))
        copy[part] = (t >> 16).to(torch.int16).view(torch.bfloat16)
        if remainder is not None:
            remainder[part] = t.to(torch.int16)
