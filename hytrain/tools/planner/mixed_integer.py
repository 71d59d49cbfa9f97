"""A mixed-integer program that is put together block by block, and its solution by HiGHS."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.planner.min_plus import Floats, Ints

try:
    from scipy import optimize, sparse
except ImportError:  # training needs no scipy, and must not stop for it
    optimize = sparse = None


@dataclass(slots=True)
class MixedIntegerProgram:
    """Columns are not negative; rows have a lower and an upper limit."""

    _lower: list[float] = field(default_factory=list[float])
    _upper: list[float] = field(default_factory=list[float])
    _gain: list[Floats] = field(default_factory=list[Floats])
    _whole: list[Floats] = field(default_factory=list[Floats])
    _entries: list[tuple[Ints, Ints, Floats]] = field(default_factory=list[Any])
    num_columns: int = 0

    def row(self, lower: float, upper: float) -> int:
        """A new row's number."""
        self._lower.append(lower)
        self._upper.append(upper)
        return len(self._lower) - 1

    def columns(self, number: int, *, whole: bool, gain: Floats | float = 0.0) -> Ints:
        """New columns' numbers.

        Args:
            number: of them.
            whole: whether they are whole numbers.
            gain: of each, what is to be the most.
        """
        new = np.arange(self.num_columns, self.num_columns + number)
        self.num_columns += number
        self._whole.append(np.full(number, float(whole)))
        self._gain.append(np.broadcast_to(np.asarray(gain, dtype=np.float64), number))
        return new

    def entries(self, rows: Ints | int, columns: Ints, values: Floats | float) -> None:
        """A value in each column, in its row; equal places are added up."""
        shape = columns.shape
        values = np.broadcast_to(np.asarray(values, dtype=np.float64), shape)
        self._entries.append((np.broadcast_to(np.asarray(rows), shape), columns, values))

    def solve(self, *, whole: bool, most_nodes: int) -> tuple[Floats | None, bool]:
        """The columns of the best solution that was found; whether there is certainly none.

        Args:
            whole: False: no column need be a whole number.
            most_nodes: branches.

        Raises:
            PlanError: scipy is not installed.
        """
        if optimize is None or sparse is None:
            raise PlanError("planning needs scipy, whose solver it uses: pip install scipy")
        rows, columns, values = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        shape = len(self._lower), self.num_columns
        matrix = sparse.csr_array((values, (rows, columns)), shape=shape)
        limited: Any = optimize.LinearConstraint  # whose stubs know numbers only
        with _silence():
            found = optimize.milp(
                -np.concatenate(self._gain),
                integrality=np.concatenate(self._whole) if whole else None,
                constraints=limited(matrix, self._lower, self._upper),
                options={"node_limit": most_nodes},
            )
        return found.x, found.status == 2

    def gained(self, solved: Floats) -> float:
        """The sum of gains."""
        return float(np.concatenate(self._gain) @ solved)


@contextlib.contextmanager
def _silence() -> Generator[None, None, None]:
    """HiGHS prints a line of its own now and then, whatever it is told: not into a plan's JSON."""
    sys.stdout.flush()
    library = ctypes.CDLL(None)
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        library.fflush(None)
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)
