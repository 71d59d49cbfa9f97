"""Sums of squares of layers' gradients: on a GPU those of many in few launches.

Each gradient leaves partial sums, how many depends on its length alone, and these are added up in
order: what it comes to does not depend on which others it is measured with.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hytrain.kernels.cpu_adam import sum_of_squares
from hytrain.kernels.launch_tables import (
    ADDRESSES,
    MOST_PARTIALS,
    NEVER,
    SUM_BLOCK,
    VECTOR,
    elements_of_partial,
    num_partials,
    triton_dtypes,
)

_NUM_FIELDS = 4
"""Of a table's: first program, elements, elements of a program, first partial sum."""


class _Kernels(NamedTuple):
    """What comes of Triton."""

    squares: Any
    add: Any
    dtypes: dict[torch.dtype, Any]


class _Launches(NamedTuple):
    """Of layers that are measured together; nothing here changes from step to step.

    Attributes:
        tables: of each launch its programs and, on the device, _NUM_FIELDS rows of ADDRESSES.
        partials: float64, on the device.
        rows: of each layer its first partial sum, how many there are, and its number, int64.
    """

    tables: list[tuple[int, torch.Tensor]]
    partials: torch.Tensor
    rows: torch.Tensor


@functools.cache
def _kernels() -> _Kernels:
    # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
    from hytrain.kernels.triton_norm import add_partials_kernel, squares_grouped_kernel

    return _Kernels(squares_grouped_kernel, add_partials_kernel, triton_dtypes())


class SquareSums:
    """One sum a layer."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        """
        Args:
            num_layers: number of layers.
            device: where gradients are.
        """
        self.values = torch.zeros(num_layers, dtype=torch.float64, device=device)
        """float64, one number a layer."""
        # Of the sets that were measured, which are few: each layer alone, and, behind backward,
        # the first k of them.
        self._made: dict[tuple[tuple[int, int], ...], _Launches] = {}

    def measure(self, layers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Sums the squares of some layers' gradients, in the current stream, always the same one.

        Args:
            layers: their numbers.
            gradients: of each, 1-D and contiguous; bf16, fp16 or fp32.
        """
        if self.values.device.type == "cuda":
            self.triton_measure(layers, gradients)
            return
        for layer, gradient in zip(layers, gradients, strict=True):
            self.values[layer] = sum_of_squares(gradient)

    def triton_measure(self, layers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """:meth:`measure` by Triton; its interpreter (TRITON_INTERPRET) takes CPU tensors."""
        kinds: dict[tuple[torch.dtype, bool], list[tuple[int, torch.Tensor]]] = {}
        for pair in zip(layers, gradients, strict=True):
            gradient = pair[1]
            aligned = (gradient.data_ptr() | gradient.numel()) % VECTOR == 0
            kinds.setdefault((gradient.dtype, aligned), []).append(pair)
        for (dtype, aligned), pairs in kinds.items():
            self._launch(pairs, dtype, aligned=aligned)

    def _launch(
        self, pairs: Sequence[tuple[int, torch.Tensor]], dtype: torch.dtype, *, aligned: bool
    ) -> None:
        kernels = _kernels()
        key = tuple((layer, gradient.numel()) for layer, gradient in pairs)
        if key not in self._made:
            self._made[key] = self._make(key)
        launches = self._made[key]
        for number, (programs, table) in enumerate(launches.tables):
            some = pairs[number * ADDRESSES : (number + 1) * ADDRESSES]
            # Triton would take no address, as an empty shard has it, for a number of 32 bits.
            addresses = [gradient.data_ptr() or table.data_ptr() for _, gradient in some]
            addresses += addresses[:1] * (ADDRESSES - len(addresses))  # of rows without a program
            kernels.squares[(programs,)](
                *addresses, table, launches.partials, GRADIENT=kernels.dtypes[dtype],
                ALIGNED=aligned, ROWS=ADDRESSES, BLOCK=SUM_BLOCK, num_warps=8,
            )  # fmt: skip
        kernels.add[(len(pairs),)](
            launches.rows, launches.partials, self.values, len(pairs), PARTIALS=MOST_PARTIALS
        )

    def _make(self, lengths: Sequence[tuple[int, int]]) -> _Launches:
        """
        Args:
            lengths: of each layer its number and its elements.
        """
        device = self.values.device
        tables: list[tuple[int, torch.Tensor]] = []
        rows: list[tuple[int, int, int]] = []
        partial = 0
        for begin in range(0, len(lengths), ADDRESSES):
            words = torch.full((_NUM_FIELDS, ADDRESSES), NEVER, dtype=torch.int64)
            programs = 0
            for row, (layer, n) in enumerate(lengths[begin : begin + ADDRESSES]):
                count = num_partials(n)
                fields = (programs, n, elements_of_partial(n, count), partial)
                words[:, row] = torch.tensor(fields)
                rows.append((partial, count, layer))
                programs += count
                partial += count
            tables.append((programs, words.to(device)))
        partials = torch.zeros(partial, dtype=torch.float64, device=device)
        return _Launches(tables, partials, torch.tensor(rows).T.contiguous().to(device))
