"""Runs of parameters whose rounded moments one launch updates, and their table on the device.

What rounds an element depends on its parameter, so a launch over several parameters looks up whose
element each is. The table does not change from step to step: the step is the kernel's argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hytrain.kernels.launch_tables import NEVER
from hytrain.kernels.moments import Rounding, parameter_state

_PERIOD = 2**32  # of the lower half of an element's index; the upper half is part of the key
_FEWEST_ROWS = 16  # so that layers of few parameters share a compiled kernel


class Run(NamedTuple):
    """Elements of one parameter.

    Attributes:
        begin: the first one, in the arrays of the launch; a multiple of 64.
        end: one past the last.
        rounding: what its random bits depend on.
    """

    begin: int
    end: int
    rounding: Rounding


class RoundedRuns:
    """Runs of ascending elements; between two of them nothing is updated."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """``runs``: at least one."""
        self.runs = tuple(runs)
        self._table: torch.Tensor | None = None
        self._block = 0
        self.num_programs = 0
        """Programs of the kernel whose table was made last."""

    def table(self, block: int, device: torch.device) -> torch.Tensor:
        """int64, 5 x rows (a power of two): first program, begin, end, index of the first element
        in its parameter, hash of seed and parameter. Rows after the last run are never reached.

        ``block``: elements of a program. ``device``: where it is wanted; it is kept there.
        """
        if self._table is None or self._table.device != device or self._block != block:
            rows, self.num_programs = self._rows(block)
            self._table = torch.tensor(list(zip(*rows, strict=True)), device=device)
            self._block = block
        return self._table

    def _rows(self, block: int) -> tuple[list[tuple[int, ...]], int]:
        rows: list[tuple[int, ...]] = []
        program = 0
        for first, end, rounding in self.runs:
            begin = first
            state = (parameter_state(rounding) ^ 2**63) - 2**63  # as a signed number
            while begin < end:
                index = rounding.first_index + begin - first
                stop = min(end, begin + _PERIOD - index % _PERIOD)
                rows.append((program, begin, stop, index, state))
                program += -(-(stop - begin) // block)
                begin = stop
        length = max(_FEWEST_ROWS, 1 << (len(rows) - 1).bit_length())
        return rows + [(NEVER, 0, 0, 0, 0)] * (length - len(rows)), program
