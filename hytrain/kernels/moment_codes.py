"""Converts moments to fp32 and back, between steps: for checkpoints, and users who access them.

Values that were read are stored again as they were: :func:`write_moment` finds codes that read as
exactly those values if there are any, and else the nearest. A block's exponent is the least with
which its largest magnitude has a code. The step that stored a block chose it before rounding, which
may have lowered that magnitude so far that the exponent below would do; with that one, the other
elements need not have exact codes. So the least exponent and the next one are tried.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hytrain.kernels.host_memory import host_zeros
from hytrain.kernels.moments import MOMENT_BLOCK, EightBit, Moment

_PIECE = 2**17
"""Elements, whole blocks, that are converted at once: temporaries take 100 bytes per element."""
_NOT_FINITE = 255


class _Code(NamedTuple):
    """Code of a magnitude: exponent bits above 4 mantissa bits (moments_kernel.inl)."""

    exponent: int

    @property
    def offset_bits(self) -> int:
        """Bits of the offset as fp32."""
        return (128 - 2**self.exponent) << 23

    @property
    def offset(self) -> float:
        return 2.0 ** (1 - 2**self.exponent)

    @property
    def most(self) -> int:
        """Mantissa bits of the largest magnitude that has a code, which has exponent 126."""
        return 2**23 - 2**_SHIFT - 2 ** (24 - 2**self.exponent)


_SHIFT = 23 - 4
_M_CODE, _V_CODE = _Code(3), _Code(4)


def part_of(moment: Moment, begin: int, end: int) -> Moment:
    """Elements ``[begin, end)`` of a moment, as a view; for codes, whole blocks from ``begin`` on.

    Args:
        moment: of any kind.
        begin: for codes, a multiple of ``MOMENT_BLOCK``.
        end: one past the last element.
    """
    if not isinstance(moment, EightBit):
        return moment[begin:end]
    first, last = begin // MOMENT_BLOCK, -(-end // MOMENT_BLOCK)
    codes = moment.codes[first * MOMENT_BLOCK : last * MOMENT_BLOCK]
    return EightBit(codes, moment.exponents[first:last])


def read_moment(moment: Moment, n: int, *, is_second: bool) -> torch.Tensor:
    """The n values of a moment as the next step reads them.

    Returns:
        fp32, 1-D: the moment itself if it is fp32; else a tensor of its own, on the host.
    """
    if not isinstance(moment, EightBit) and moment.dtype == torch.float32:
        return moment
    # Not malloc's, which keeps what is freed: as much as a parameter, for each size that occurs.
    values = host_zeros(n, purpose="the values of a moment", inherited=True)
    if not isinstance(moment, EightBit):
        return values.copy_(moment)
    codes, exponents = moment.codes.cpu(), moment.exponents.cpu()
    for at in range(0, n, _PIECE):
        end = min(at + _PIECE, n)
        part = part_of(EightBit(codes, exponents), at, end)
        assert isinstance(part, EightBit)
        values[at:end] = _decoded(part, is_second)[: end - at]
    return values


def write_moment(moment: Moment, values: torch.Tensor, *, is_second: bool) -> None:
    """Stores values in a moment, rounded to the nearest that it can hold.

    Args:
        moment: of the values' length; written.
        values: fp32 or another floating dtype, 1-D, on any device.
        is_second: values are not negative, and those above zero must not become zero.
    """
    if not isinstance(moment, EightBit):
        moment.copy_(values)
        return
    n = values.numel()
    for at in range(0, n, _PIECE):
        end = min(at + _PIECE, n)
        found = _encoded(values[at:end].to("cpu", torch.float32), is_second)
        part = part_of(moment, at, end)
        assert isinstance(part, EightBit)
        part.codes.copy_(found.codes)
        part.exponents.copy_(found.exponents)


def _decoded(moment: EightBit, is_second: bool) -> torch.Tensor:
    # A block's bytes are 16 words of 4: byte b of word w is element 16 b + w.
    codes = moment.codes.view(-1, 16, 4).transpose(1, 2).reshape(-1, MOMENT_BLOCK).int()
    exponents = moment.exponents.int()[:, None]
    if is_second:
        return _magnitudes(codes, exponents, _V_CODE).view(-1)
    magnitude = _magnitudes(codes & 0x7F, exponents, _M_CODE)
    return torch.where(codes >= 0x80, -magnitude, magnitude).view(-1)


def _magnitudes(codes: torch.Tensor, exponents: torch.Tensor, code: _Code) -> torch.Tensor:
    """fp32 magnitudes of codes, a row per block; by way of float64, where operations are exact."""
    y = ((codes << _SHIFT) + code.offset_bits).view(torch.float32).double()
    values = torch.ldexp(y - code.offset, exponents - 127).float()
    values = torch.where(exponents == 0, 0.0, values)
    return torch.where(exponents == _NOT_FINITE, torch.nan, values)


def _encoded(values: torch.Tensor, is_second: bool) -> EightBit:
    code = _V_CODE if is_second else _M_CODE
    num_blocks = -(-values.numel() // MOMENT_BLOCK)
    padded = torch.zeros(num_blocks * MOMENT_BLOCK)
    padded[: values.numel()] = values
    padded = padded.view(num_blocks, MOMENT_BLOCK)
    magnitude = padded.abs()
    bits = magnitude.view(torch.int32).amax(1, keepdim=True)
    bits = torch.where(magnitude.isnan().any(1, keepdim=True), 2**31 - 2**23, bits)
    least = (bits + (2**23 - 1 - code.most)) >> 23
    codes, exponents, is_exact = _codes(magnitude, least, code, is_second)
    if not bool(is_exact.all()):
        others, other_exponents, other_is_exact = _codes(magnitude, least + 1, code, is_second)
        takes_other = ~is_exact & other_is_exact
        codes = torch.where(takes_other, others, codes)
        exponents = torch.where(takes_other, other_exponents, exponents)
    if not is_second:
        has_codes = (exponents > 0) & (exponents < _NOT_FINITE)
        codes = codes | torch.where(has_codes & padded.signbit(), 0x80, 0)
    interleaved = codes.to(torch.uint8).view(-1, 4, 16).transpose(1, 2).reshape(-1)
    return EightBit(interleaved, exponents.to(torch.uint8).view(-1))


def _codes(
    magnitude: torch.Tensor, exponents: torch.Tensor, code: _Code, is_second: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The nearest codes with one exponent per row; exponents as kept; which rows are exact."""
    exponents = torch.where(exponents >= 254, _NOT_FINITE, exponents.clamp(min=0))
    has_codes = (exponents > 0) & (exponents < _NOT_FINITE)
    scaled = torch.ldexp(torch.where(has_codes, magnitude, 0.0).double(), 127 - exponents)
    y = (scaled + code.offset).float().view(torch.int32)
    codes = (y + (1 << (_SHIFT - 1)) - code.offset_bits) >> _SHIFT
    codes = codes.clamp(max=2 ** (4 + code.exponent) - 1)
    if is_second:
        codes = torch.where(magnitude > 0, codes.clamp(min=1), codes)
    codes = torch.where(has_codes, codes, 0)
    read = _magnitudes(codes, exponents, code)
    return codes, exponents, (read == magnitude).all(1, keepdim=True)
