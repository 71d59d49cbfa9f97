"""Tables in whose rows kernels find their elements, and what launches over them share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

NEVER = 2**62
"""First program of rows after the last one: they are never reached."""
ADDRESSES = 16
"""Rows of a table whose addresses are a launch's arguments, which need no copy to the device."""
SUM_BLOCK = 2048
"""Elements that a program sums at once."""
MOST_PARTIALS = 1024
VECTOR = 16
"""Bytes, and elements: kernels move vectors if addresses and lengths are multiples of it."""
TRITON_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.uint16: "uint16",  # halves of split master weights
}


class RowTable(NamedTuple):
    """What never changes of a launch over ADDRESSES rows.

    Attributes:
        first: number of its first row.
        programs: programs of the launch.
        words: int64, on the device: for each field ADDRESSES rows.
    """

    first: int
    programs: int
    words: torch.Tensor

    def addresses(self, every: Sequence[int]) -> list[int]:
        """The addresses of its rows, out of all; filled up for rows that have no program."""
        some = list(every[self.first : self.first + ADDRESSES])
        return some + some[:1] * (ADDRESSES - len(some))


def row_tables(
    programs: Sequence[int], fields: Sequence[Sequence[int]], device: torch.device
) -> list[RowTable]:
    """Tables of as many launches as the rows need; their first field is a row's first program."""
    tables: list[RowTable] = []
    for first in range(0, len(programs), ADDRESSES):
        words = torch.full((1 + len(fields[first]), ADDRESSES), NEVER, dtype=torch.int64)
        total = 0
        for row, others in enumerate(fields[first : first + ADDRESSES]):
            words[:, row] = torch.tensor((total, *others))
            total += programs[first + row]
        tables.append(RowTable(first, total, words.to(device)))
    return tables


@functools.cache
def triton_dtypes() -> dict[torch.dtype, Any]:
    """Triton's dtypes, by the torch dtypes that kernels read and write.

    Triton comes with torch's CUDA builds only: called where a GPU is present.
    """
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    return {dtype: getattr(tl, name) for dtype, name in TRITON_DTYPES.items()}


def num_partials(numel: int) -> int:
    """Partial sums that ``numel`` elements leave on a GPU; fixed, and so is their order."""
    return min(MOST_PARTIALS, max(1, -(-numel // SUM_BLOCK)))


def elements_of_partial(numel: int, partials: int) -> int:
    """Elements of each partial sum: whole blocks."""
    return -(-numel // (partials * SUM_BLOCK)) * SUM_BLOCK
