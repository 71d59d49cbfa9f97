"""Sums of squares of layers' gradients: on a GPU those of many in few launches.

Each gradient leaves partial sums, whose number depends on its length alone, and these are added up
in a fixed order: its sum does not depend on which others it is measured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hytrain.kernels.cpu_adam import sum_of_squares
from hytrain.kernels.launch_tables import (
    ADDRESSES,
    MOST_PARTIALS,
    SUM_BLOCK,
    VECTOR,
    RowTable,
    elements_of_partial,
    num_partials,
    row_tables,
    triton_dtypes,
)


class _Launches(NamedTuple):
    """The launches for layers measured together; nothing here changes from step to step.

    Attributes:
        tables: one for each launch. Fields: elements, elements of a program, first partial sum.
        partials: float64, on the device.
        rows: for each layer its first partial sum, how many it has, and its index; int64.
    """

    tables: list[RowTable]
    partials: torch.Tensor
    rows: torch.Tensor


class SquareSums:
    """One sum of squares for each layer."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.values = torch.zeros(num_layers, dtype=torch.float64, device=device)
        """float64, one number a layer."""
        # For the sets of layers that were measured, which are few: each layer alone, and, after
        # backward, the first k of them.
        self._made: dict[tuple[tuple[int, int], ...], _Launches] = {}

    def measure(self, layers: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Sums the squares of some layers' gradients, in the current stream, always the same one.

        ``gradients``: one for each, 1-D and contiguous; bf16, fp16 or fp32.
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
        # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
        from hytrain.kernels import triton_norm

        kernels: Any = triton_norm
        key = tuple((layer, gradient.numel()) for layer, gradient in pairs)
        if key not in self._made:
            self._made[key] = self._make(key)
        launches = self._made[key]
        # An empty shard has no address, which Triton would take for a number of 32 bits.
        addresses = [g.data_ptr() or launches.partials.data_ptr() for _, g in pairs]
        for table in launches.tables:
            kernels.squares_grouped_kernel[(table.programs,)](
                *table.addresses(addresses), table.words, launches.partials,
                GRADIENT=triton_dtypes()[dtype], ALIGNED=aligned, ROWS=ADDRESSES, BLOCK=SUM_BLOCK,
                num_warps=8,
            )  # fmt: skip
        kernels.add_partials_kernel[(len(pairs),)](
            launches.rows, launches.partials, self.values, len(pairs), PARTIALS=MOST_PARTIALS
        )

    def _make(self, lengths: Sequence[tuple[int, int]]) -> _Launches:
        """Makes launches; ``lengths``: for each layer its index and its elements."""
        device = self.values.device
        counts = [num_partials(n) for _, n in lengths]
        firsts = list(accumulate(counts, initial=0))
        fields = [
            (n, elements_of_partial(n, count), first)
            for (_, n), count, first in zip(lengths, counts, firsts, strict=False)
        ]
        rows = torch.tensor([firsts[:-1], counts, [layer for layer, _ in lengths]])
        partials = torch.zeros(firsts[-1], dtype=torch.float64, device=device)
        return _Launches(row_tables(counts, fields, device), partials, rows.to(device))
