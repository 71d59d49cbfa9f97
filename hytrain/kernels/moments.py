"""How the moments of Adam may be kept: fp32, bf16, or 8-bit codes in blocks that share an exponent.

bf16 and codes are rounded stochastically whenever a pass stores them. The random bits are a hash of
the seed, the parameter, the step and the element's index in its parameter, so they are the same for
every instruction set, thread count, split of a parameter and device (docs/internals.md, "Moments in
fewer bytes"). ``tests/support/reference_adam.py`` has the rounding in NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hytrain import _C
from hytrain.errors import KernelArgumentError
from hytrain.kernels.split_weights import is_split

MOMENT_BLOCK = _C.moment_block
"""Elements that share an exponent, from a parameter's start on; its last block may be short."""

_WORD = 2**64
_KINDS = {
    torch.float32: _C.MomentKind.float32,
    torch.bfloat16: _C.MomentKind.bfloat16,
    torch.uint8: _C.MomentKind.eight_bit,
}


class EightBit(NamedTuple):
    """One moment in 8-bit codes.

    Attributes:
        codes: uint8, ``MOMENT_BLOCK`` for each block, also for a short last one; in each block, the
            code of element 16 b + w is at byte 4 w + b.
        exponents: uint8, one for each ``MOMENT_BLOCK`` elements or part of it.
    """

    codes: torch.Tensor
    exponents: torch.Tensor


Moment = torch.Tensor | EightBit
"""One moment of n elements: a tensor of fp32 or bf16, or codes."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """What the random bits of a run of elements depend on, besides the step.

    Attributes:
        seed: That of the whole training run, in [0, 2**64).
        parameter: A number that no other parameter of the model has, in [0, 2**64).
        first_index: Index of the run's first element in its parameter, a multiple of
            ``MOMENT_BLOCK``.

    Raises:
        KernelArgumentError: A value is outside its range.
    """

    seed: int
    parameter: int
    first_index: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("seed", self.seed),
            ("parameter", self.parameter),
            ("first_index", self.first_index),
        ):
            if not 0 <= value < _WORD:
                raise KernelArgumentError(f"{name} is {value}; it must be in [0, 2**64)")
        if self.first_index % MOMENT_BLOCK:
            raise KernelArgumentError(
                f"first_index is {self.first_index}; bits and exponents are made for blocks: "
                f"begin at a multiple of {MOMENT_BLOCK}"
            )


def moment_kind(moment: Moment) -> torch.dtype:
    """The dtype that names how a moment is kept: float32, bfloat16, or uint8 for codes."""
    return moment.codes.dtype if isinstance(moment, EightBit) else moment.dtype


def zero_moment(kind: torch.dtype, n: int, device: torch.device | str = "cpu") -> Moment:
    """A moment of n zeros, kept as ``kind`` (see :func:`moment_kind`)."""
    if kind != torch.uint8:
        return torch.zeros(n, dtype=kind, device=device)
    num_blocks = -(-n // MOMENT_BLOCK)
    sizes = num_blocks * MOMENT_BLOCK, num_blocks
    return EightBit(*(torch.zeros(size, dtype=kind, device=device) for size in sizes))


def check_moments(m: Moment, v: Moment, rounding: object, *, stores: bool) -> None:
    """Refuses two moments of different kinds, and codes or bf16 without what rounds them.

    Raises:
        KernelArgumentError: One of these, or a dtype that is not allowed.
    """
    kind = moment_kind(m)
    for name, moment in (("m", m), ("v", v)):
        if isinstance(moment, EightBit) != (moment_kind(moment) == torch.uint8):
            raise KernelArgumentError(
                f"{name} is {moment_kind(moment)}; allowed: torch.float32, torch.bfloat16, or "
                "EightBit of torch.uint8: convert it"
            )
        if moment_kind(moment) not in _KINDS:
            allowed = "torch.float32, torch.bfloat16"
            raise KernelArgumentError(
                f"{name} is {moment_kind(moment)}; allowed: {allowed}: convert it"
            )
    if kind != moment_kind(v):
        raise KernelArgumentError(
            f"m is {kind} but v is {moment_kind(v)}: keep both moments in one kind"
        )
    if stores and rounding is None and kind != torch.float32:
        raise KernelArgumentError(
            f"m is {kind}, which is rounded when it is stored: pass rounding="
        )


def native_moments(m: Moment, v: Moment, rounding: Rounding | None) -> _C.Moments:
    """The moments for the compiled extension; the tensors must outlive it."""
    (m_at, m_exponents), (v_at, v_exponents) = _addresses(m), _addresses(v)
    chosen = rounding or Rounding(0, 0)
    return _C.Moments(
        _KINDS[moment_kind(m)],
        m_at,
        v_at,
        m_exponents,
        v_exponents,
        chosen.seed,
        [_C.MomentRun(0, chosen.parameter, chosen.first_index)],
    )


def native_arrays(p: torch.Tensor, m: Moment, v: Moment, seed: int) -> _C.StateArrays:
    """Where a shard's master weights and moments are, for the update worker.

    Args:
        p: master weights, fp32, or int16: the remainders of split ones; they and the moments are
            on the host or the device.
        m, v: the moments, both of one kind.
        seed: seed of the random bits that round them.
    """
    (m_at, m_exponents), (v_at, v_exponents) = _addresses(m), _addresses(v)
    kind = _KINDS[moment_kind(m)]
    return _C.StateArrays(
        p.data_ptr(), m_at, v_at, kind, m_exponents, v_exponents, seed, is_split(p)
    )


def _addresses(moment: Moment) -> tuple[int, int]:
    if isinstance(moment, EightBit):
        return moment.codes.data_ptr(), moment.exponents.data_ptr()
    return moment.data_ptr(), 0


def rounding_key(rounding: Rounding, step: int, high: int = 0) -> int:
    """The 32-bit key of the random bits of one step.

    The finalizer of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators", 2014), absorbing one word at a time.

    Args:
        rounding: Seed and parameter.
        step: Number of the step whose moments are stored.
        high: Upper half of the elements' 64-bit indices.
    """
    return _absorb(_absorb(parameter_state(rounding), step), high) >> 32


def parameter_state(rounding: Rounding) -> int:
    """The 64-bit state of :func:`rounding_key` after seed and parameter, before the step."""
    return _absorb(_absorb(0, rounding.seed), rounding.parameter)


def _absorb(state: int, word: int) -> int:
    z = ((state ^ word) + 0x9E3779B97F4A7C15) % _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WORD
    return z ^ (z >> 31)
