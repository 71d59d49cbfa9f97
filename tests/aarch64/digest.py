"""Prints "<instruction set> <pass> <moments> <dtype> <digest>" for each pass of the CPU kernel.

The inputs are the same on every machine, so two machines' digests can be compared: run.sh does.
Needs no torch, so that packaging/check_wheel.py can try a wheel where none can be had.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import itertools
from types import ModuleType

import numpy as np


def extension() -> ModuleType:
    """hytrain._C, with torch's OpenMP runtime, or GCC's where there is no torch."""
    if importlib.util.find_spec("torch"):
        from hytrain import _C

        return _C
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("hytrain._C")


_C = extension()
N = 20_000 + 7  # whole blocks of a register, of codes, and what is left
KINDS = ("float32", "bfloat16", "eight_bit")
DTYPES = ("float32", "bfloat16", "float16")


def words(seed: int) -> np.ndarray:
    """N numbers of 32 bits, by a mixing function of their index, as float32 in (-1, 1)."""
    with np.errstate(over="ignore"):
        h = np.arange(N, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(seed)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
        h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    values = (h.view(np.int32) >> 8).astype(np.float32) * np.float32(2.0**-23)
    # Every thousandth is huge, tiny or zero.
    scale = np.array([1e30, 1e-30, 1e-40, 0.0], dtype=np.float32)
    values[::1000] *= np.resize(scale, values[::1000].shape)
    return values


def to_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to nearest; bfloat16 is a uint16 of its bits."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def with_one_nan(array: np.ndarray, dtype: str) -> np.ndarray:
    """A copy with one NaN for all: a CPU chooses their payload."""
    if dtype == "bfloat16":
        return np.where((array & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), array)
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array)


def digest(*arrays: np.ndarray) -> str:
    """Of their bits."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(array.tobytes())
    return total.hexdigest()


class Moments:
    """Moments of zero."""

    def __init__(self, kind: str) -> None:
        blocks = -(-N // _C.moment_block)
        sizes = {"float32": (N, 4), "bfloat16": (N, 2), "eight_bit": (blocks * _C.moment_block, 1)}
        size, width = sizes[kind]
        self.kind = kind
        self.m, self.v = (np.zeros(size, dtype=f"u{width}") for _ in range(2))
        self.exponents = [np.zeros(blocks, dtype=np.uint8) for _ in range(2)]
        self.native = _C.Moments(
            getattr(_C.MomentKind, kind),
            self.m.ctypes.data,
            self.v.ctypes.data,
            *(array.ctypes.data for array in self.exponents),
            seed=7,
            runs=[_C.MomentRun(0, 3, 0)],
        )

    def parts(self) -> list[np.ndarray]:
        """What the moments are kept in."""
        if self.kind == "eight_bit":
            return [self.m, self.v, *self.exponents]
        if self.kind == "float32":
            return [with_one_nan(each.view(np.float32), "float32") for each in (self.m, self.v)]
        return [with_one_nan(each, self.kind) for each in (self.m, self.v)]


def split(p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copy and remainder of finite weights, see ``hytrain/kernels/split_weights.py``."""
    t = p.view(np.uint32) + np.uint32(0x8000)
    return (t >> 16).astype(np.uint16), t.astype(np.uint16)


def passes(kind: str, dtype: str) -> dict[str, str]:
    """Digest of each pass with moments of a kind, gradients and copies of a dtype."""
    hyper = _C.AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 3, True, True)
    native = getattr(_C.DType, dtype)
    gradients = [to_dtype(words(seed), dtype) for seed in (2, 3)]
    first, second = (_C.GradientStep(g.ctypes.data, native, 0.7, hyper) for g in gradients)
    moments, p = Moments(kind), words(1)
    out = np.zeros(N, dtype="u2" if dtype == "bfloat16" else dtype)
    to = _C.Outgoing(out.ctypes.data, native, False)
    at, found = p.ctypes.data, {}
    _C.preview(at, moments.native, N, first, to, 1)
    found["preview"] = digest(with_one_nan(out, dtype))

    def written() -> str:
        return digest(with_one_nan(p, "float32"), *moments.parts(), with_one_nan(out, dtype))

    _C.commit(at, moments.native, N, first, to, 1)
    found["commit"] = written()
    _C.commit_then_preview(at, moments.native, N, first, second, to, 1)
    found["commit_then_preview"] = written()
    _C.publish(at, N, to, 1)
    found["publish"] = digest(with_one_nan(out, dtype))
    found["sum_of_squares"] = repr(_C.sum_of_squares(gradients[0].ctypes.data, native, N, 1))
    copy, remainder = split(words(1))
    at = copy.ctypes.data
    _C.commit_split(at, remainder.ctypes.data, moments.native, N, second, 1)
    found["commit_split"] = digest(with_one_nan(copy, "bfloat16"), remainder, *moments.parts())
    return found


def main() -> None:
    """Prints them."""
    for isa in _C.available_isas():
        _C.set_isa(isa)
        for kind, dtype in itertools.product(KINDS, DTYPES):
            for name, found in passes(kind, dtype).items():
                print(isa, name, kind, dtype, found)


if __name__ == "__main__":
    main()
