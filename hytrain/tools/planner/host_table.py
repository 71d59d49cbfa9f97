"""What the ranks of one host hold together: a table over samples and sums of a (frontier.py).

A rank cannot do more than its largest offer, so in a step that is hardly long enough all of them
must do nearly that: of the samples only those rows are made that the other ranks leave open, and
those are few however large the batch is. Of the sums of a only those columns are made with which
the host's limit still binds. Neither leaves out a choice that could have been taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hytrain.tools.planner.cost_model import Load
from hytrain.tools.planner.min_plus import Ints, StepFunction
from hytrain.tools.planner.pareto_set import Grid, ParetoSet

_Table = npt.NDArray[np.signedinteger[Any]]

_NEVER = -(2**40)
# Columns of a host's table.
_MOST_COLUMNS = 512
# Pareto sets are tried one by one in tables of so many cells, several at once in smaller ones.
_ONE_BY_ONE = 2**12
# Cells of a table with as many offers as are tried at once.
_AT_ONCE = 2**16
# Tables are of numbers as small as will do: they are most of a plan's work, and bandwidth is what
# it takes. Two cells' sum must fit.
_MOST_HELD = 2**13


class HostTable:
    """What the ranks of one host hold together, for each number of samples.

    Attributes:
        least: samples of its first row, which the host computes at least.
    """

    def __init__(
        self, members: Sequence[ParetoSet], limit: int, grid: Grid, rows: range, host_most: int
    ) -> None:
        """
        Args:
            members: offers of each rank; none may be empty.
            limit: H, units that the host can hold and update.
            grid: the units.
            rows: samples that the host may have to compute; the last is at most what it can.
            host_most: units that the host can hold if it updates none of them.
        """
        self._members = members
        self.least = rows[0]
        self._rows = _rows(members, rows)
        # Where the host's limit binds no choice, only the sum of d counts.
        slack = sum(int((offer.holds - offer.keeps).max()) for offer in members) <= limit
        lowest = [0 if slack else min(0, int(offer.keeps.min())) for offer in members]
        self._keeps = [
            np.zeros_like(offer.keeps) if slack else offer.keeps - low
            for offer, low in zip(members, lowest, strict=True)
        ]
        limit = grid.units if slack else limit + sum(lowest)
        held = min(grid.units, host_most)
        # More than what lets the limit be no limit would be for nothing.
        most = min(sum(int(keeps.max()) for keeps in self._keeps), max(0, held - limit))
        # Offloaded activations may be many times the state: then sums of a are kept coarsely.
        coarse = -(-most // _MOST_COLUMNS) or 1
        up = coarse - 1 if grid.outer else 0
        self._keeps = [(keeps + up) // coarse for keeps in self._keeps]
        most = min(-(-most // coarse), sum(int(keeps.max()) for keeps in self._keeps))
        # More than the host can hold is for nothing; a rank holds no less than nothing.
        self._held = max(0, held)
        dtype = np.int16 if self._held <= _MOST_HELD else np.int64
        table: _Table = np.full((1, most + 1), _never(dtype), dtype=dtype)
        table[0, 0] = 0
        self._tables = [table]
        for number in range(len(members)):
            table = self._with(table, number)
            self._tables.append(table)
        capped = np.minimum(table.astype(np.int64), np.arange(most + 1) * coarse + limit)
        self._best = np.where(table >= 0, np.minimum(capped, held), _NEVER)

    @property
    def num_cells(self) -> int:
        """Of all tables, times the offers that were tried for each: the work that it took."""
        pairs = zip(self._tables[1:], self._members, strict=True)
        return sum(table.size * len(offer.amounts) for table, offer in pairs)

    def _with(self, table: _Table, number: int) -> _Table:
        """One more rank: each demand is what is left of it for the others, or nothing."""
        offer, keeps = self._members[number], self._keeps[number]
        before, rows = self._rows[number], self._rows[number + 1]
        columns = table.shape[1]
        wide, deep = int(offer.amounts.max()), int(min(keeps.max(), columns - 1))
        # Where less than nothing is left, it is nothing: the first row and column, repeated.
        above = max(0, before[0] + wide - rows[0])
        below = max(0, rows[-1] - int(offer.amounts.min()) - before[-1])
        never = _never(table.dtype)
        shape = above + len(before) + below, deep + columns
        padded = np.full(shape, never, dtype=table.dtype)
        padded[above : above + len(before), deep:] = table
        padded[:above, deep:] = table[0]
        padded[:, :deep] = padded[:, deep : deep + 1]
        tops = above + rows[0] - before[0] - offer.amounts
        lefts = deep - np.minimum(keeps, deep)
        holds = np.minimum(offer.holds, self._held).astype(table.dtype)
        result = np.full((len(rows), columns), never, dtype=table.dtype)
        add = _add_one_by_one if result.size >= _ONE_BY_ONE else _add_at_once
        add(result, padded, tops, lefts, holds)
        np.minimum(result, self._held, out=result)
        result[result < 0] = never
        return result

    def steps(self) -> StepFunction:
        """(samples more than ``least``, less than nothing by what is held); labels are samples."""
        best = self._best.max(axis=1)
        more = np.flatnonzero(best > _NEVER // 2)
        steps = StepFunction.pareto(more, -best[more].astype(np.float64))
        return StepFunction(steps.amounts, steps.costs, more[steps.labels] + self.least)

    def trace(self, samples: int) -> list[Load]:
        """What each rank takes, for a label of :meth:`steps`."""
        row, column = samples, int(self._best[samples - self.least].argmax())
        loads: list[Load] = []
        for number in reversed(range(len(self._members))):
            offer, keeps = self._members[number], self._keeps[number]
            rows = np.maximum(row - offer.amounts, 0)
            columns = np.maximum(column - keeps, 0)
            before, table = self._rows[number], self._tables[number]
            within = np.minimum(rows, before[-1]) - before[0]
            left = table[within, columns].astype(np.int64)
            is_possible = (rows <= before[-1]) & (left >= 0)
            sums = np.where(is_possible, left, _NEVER) + offer.holds
            taken = int(sums.argmax())
            loads.append(offer.loads[int(offer.labels[taken])])
            row, column = int(rows[taken]), int(columns[taken])
        return loads[::-1]


def _never(dtype: npt.DTypeLike) -> int:
    """What is less than nothing, and stays so with the most that is added to it."""
    return -(2**14) if dtype == np.int16 else _NEVER


def _add_one_by_one(result: _Table, padded: _Table, tops: Ints, lefts: Ints, holds: _Table) -> None:
    """The best of ``result`` and of all windows of its shape, each with its number added."""
    rows, columns = result.shape
    candidate = np.empty_like(result)
    for top, left, held in zip(tops.tolist(), lefts.tolist(), holds, strict=True):
        np.add(padded[top : top + rows, left : left + columns], held, out=candidate)
        np.maximum(result, candidate, out=result)


def _add_at_once(result: _Table, padded: _Table, tops: Ints, lefts: Ints, holds: _Table) -> None:
    """As :func:`_add_one_by_one` where calls would take longer than what they do."""
    windows = np.lib.stride_tricks.sliding_window_view(padded, result.shape)
    stride = max(1, _AT_ONCE // result.size)
    for first in range(0, len(tops), stride):
        some = slice(first, first + stride)
        candidates = windows[tops[some], lefts[some]]
        candidates += holds[some, None, None]
        np.maximum(result, candidates.max(axis=0), out=result)


def _rows(members: Sequence[ParetoSet], rows: range) -> list[range]:
    """Samples that the first 0, 1, 2, ... ranks may have to compute.

    At least what the later ones cannot, at most what they can.
    """
    most = [int(offer.amounts.max()) for offer in members]
    within = [0, *itertools.accumulate(most)]
    return [range(max(0, rows[0] - within[-1] + sum_), min(rows[-1], sum_) + 1) for sum_ in within]
