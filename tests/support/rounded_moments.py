"""Moments in bf16 and 8 bits by their definition: an fp32 step, then NumPy's rounding.

What the random bits depend on is computed here from names and indices alone, so that a run, which
takes it from its layout, is compared with something independent.
"""

from __future__ import annotations

import hashlib

import torch

from hytrain.kernels.cpu_adam import Gradient, commit
from hytrain.kernels.moment_codes import part_of
from hytrain.kernels.moments import EightBit, Moment, Rounding
from support.reference_adam import read_moments, stored_moments


def rounding_of(name: str, first_index: int, seed: int = 0) -> Rounding:
    """Returns the rounding of a parameter's elements from ``first_index`` on."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return Rounding(seed, int.from_bytes(digest, "little"), first_index)


def commit_by_definition(
    p: torch.Tensor, m: Moment, v: Moment, gradient: Gradient, rounding: Rounding
) -> None:
    """Makes one step of elements of one parameter, in place; m and v are as they are stored."""
    n = p.numel()
    wide_m, wide_v = (values[:n].clone() for values in read_moments(m, v))
    commit(p, wide_m, wide_v, gradient)
    kind = torch.uint8 if isinstance(m, EightBit) else torch.bfloat16
    found = stored_moments(wide_m, wide_v, kind, rounding, gradient.hyper.step)
    for target, values in zip((m, v), found, strict=True):
        for kept, new in zip(tensors_of(target), tensors_of(values), strict=True):
            kept.copy_(new)


def tensors_of(moment: Moment) -> tuple[torch.Tensor, ...]:
    """Returns the tensors in which a moment is stored."""
    return tuple(moment) if isinstance(moment, EightBit) else (moment,)


def copy_of(moment: Moment) -> Moment:
    """Returns a copy of a moment on the CPU, in memory of its own."""
    if isinstance(moment, EightBit):
        return EightBit(*(t.detach().cpu().clone() for t in moment))
    return moment.detach().cpu().clone()


def joined(moments: list[Moment]) -> Moment:
    """Joins shards of a moment in order; each consists of whole blocks."""
    columns = zip(*(tensors_of(moment) for moment in moments), strict=True)
    tensors = [torch.cat(column) for column in columns]
    return EightBit(*tensors) if len(tensors) == 2 else tensors[0]


__all__ = [
    "commit_by_definition", "copy_of", "joined", "part_of", "rounding_of", "tensors_of",
]  # fmt: skip
