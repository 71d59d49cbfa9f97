"""Prints "<instruction set> <pass> <moments> <dtype> <digest>" for each pass of the CPU kernel.

The inputs are the same on every machine, so two machines' digests can be compared: run.sh does.
"""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import torch

from hytrain.kernels import cpu_adam
from hytrain.kernels.cpu_adam import AdamHyper, Gradient
from hytrain.kernels.moments import Moment, Rounding, zero_moment
from hytrain.kernels.split_weights import split

N = 20_000 + 7  # whole blocks of a register, of codes, and what is left
HYPER = AdamHyper(lr=1e-3, weight_decay=0.1, step=3)


def words(seed: int) -> torch.Tensor:
    """N numbers of 32 bits, by a mixing function of their index, as float32 in (-1, 1)."""
    with np.errstate(over="ignore"):
        h = np.arange(N, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(seed)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    values = (h.view(np.int32) >> 8).astype(np.float32) * np.float32(2.0**-23)
    # Every thousandth is huge, tiny or zero.
    scale = np.array([1e30, 1e-30, 1e-40, 0.0], dtype=np.float32)
    values[::1000] *= np.resize(scale, values[::1000].shape)
    return torch.from_numpy(values)


def digest(tensors: list[torch.Tensor]) -> str:
    """Of the tensors' bits, with one NaN for all."""
    total = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def parts(moment: Moment) -> list[torch.Tensor]:
    """What a moment is kept in."""
    return [moment] if isinstance(moment, torch.Tensor) else list(moment)


def passes(kind: torch.dtype, dtype: torch.dtype) -> dict[str, str]:
    """Digest of each pass with moments of a kind, gradients and copies of a dtype."""
    rounding = None if kind == torch.float32 else Rounding(seed=7, parameter=3)
    p, m, v = words(1), zero_moment(kind, N), zero_moment(kind, N)
    first, second = (Gradient(words(s).to(dtype), 0.7, HYPER) for s in (2, 3))
    out = torch.empty(N, dtype=dtype)
    found = {}
    cpu_adam.preview(p, m, v, first, out=out)
    found["preview"] = digest([out])
    cpu_adam.commit(p, m, v, first, out=out, rounding=rounding)
    found["commit"] = digest([p, *parts(m), *parts(v), out])
    cpu_adam.commit_then_preview(p, m, v, first, second, out=out, rounding=rounding)
    found["commit_then_preview"] = digest([p, *parts(m), *parts(v), out])
    cpu_adam.publish(p, out=out)
    found["publish"] = digest([out])
    found["sum_of_squares"] = repr(cpu_adam.sum_of_squares(first.tensor))
    copy, remainder = torch.empty(N, dtype=torch.bfloat16), torch.empty(N, dtype=torch.int16)
    split(p, copy, remainder)
    cpu_adam.commit_split(copy, remainder, m, v, second, rounding=rounding)
    found["commit_split"] = digest([copy, remainder, *parts(m), *parts(v)])
    return found


def main() -> None:
    """Prints them."""
    kinds = (torch.float32, torch.bfloat16, torch.uint8)
    for isa in cpu_adam.available_isas():
        cpu_adam.set_isa(isa)
        for kind, dtype in itertools.product(kinds, (torch.float32, torch.bfloat16, torch.float16)):
            for name, found in passes(kind, dtype).items():
                print(isa, name, str(kind)[6:], str(dtype)[6:], found)


if __name__ == "__main__":
    main()
