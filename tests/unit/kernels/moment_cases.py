"""Shared by the tests of moments in fewer bytes: states, and comparison of their bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_cases import make_case, same_bits
from support.reference_adam import read_moments, stored_moments

from hytrain.kernels.moments import MOMENT_BLOCK, EightBit, Moment, Rounding

KINDS = (torch.bfloat16, torch.uint8)
# Around a register, a block of codes and a thread's block.
LENGTHS = (1, 15, 16, 63, 64, 65, 1000, 16384 + 5, 2 * 16384 + 129)


@dataclass
class RoundedCase:
    """Master weights, both moments in one kind, and two gradients of n elements."""

    p: torch.Tensor
    m: Moment
    v: Moment
    previous: torch.Tensor
    current: torch.Tensor

    @property
    def state(self) -> tuple[torch.Tensor, Moment, Moment]:
        return self.p, self.m, self.v

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The moments in fp32."""
        m, v = read_moments(self.m, self.v)
        return m[: self.p.numel()], v[: self.p.numel()]

    def part(self, begin: int, end: int) -> RoundedCase:
        """A view of [begin, end); begin is a multiple of the block."""
        m, v = (moment_part(moment, begin, end) for moment in (self.m, self.v))
        rest = (t[begin:end] for t in (self.p, self.previous, self.current))
        p, previous, current = rest
        return RoundedCase(p, m, v, previous, current)


def moment_part(moment: Moment, begin: int, end: int) -> Moment:
    if not isinstance(moment, EightBit):
        return moment[begin:end]
    first, last = begin // MOMENT_BLOCK, -(-end // MOMENT_BLOCK)
    codes = moment.codes[first * MOMENT_BLOCK : last * MOMENT_BLOCK]
    return EightBit(codes, moment.exponents[first:last])


def make_rounded(
    n: int, kind: torch.dtype, dtype: torch.dtype, *, offset: int = 0, seed: int = 0
) -> RoundedCase:
    """A case of ``make_case`` with moments as an earlier step stored them; always the same."""
    case = make_case(n, dtype, offset=offset, seed=seed)
    m, v = (
        shifted(moment, offset)
        for moment in stored_moments(case.m, case.v, kind, Rounding(3, 4), 2)
    )
    return RoundedCase(case.p, m, v, case.previous, case.current)


def shifted(moment: Moment, offset: int) -> Moment:
    """A copy that begins ``offset`` elements after an aligned address."""
    if isinstance(moment, EightBit):
        return EightBit(*(_shifted(tensor, offset) for tensor in moment))
    return _shifted(moment, offset)


def _shifted(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    home = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype)
    home[offset:] = tensor
    return home[offset:]


def same_moment(a: Moment, b: Moment) -> bool:
    """Bitwise equality; a NaN in bf16 equals any NaN."""
    if isinstance(a, EightBit) or isinstance(b, EightBit):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return same_bits(a, b)


def same_state(a: RoundedCase, b: RoundedCase) -> bool:
    return same_bits(a.p, b.p) and same_moment(a.m, b.m) and same_moment(a.v, b.v)
