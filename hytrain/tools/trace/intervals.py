"""Sets of time as sorted, disjoint, half-open intervals [begin, end) in whole nanoseconds.

Whole numbers, so that parts sum to their total exactly.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]


class Intervals:
    """An immutable set of time.

    Attributes:
        begin, end: int64 [n], ascending, ``begin[i] < end[i] < begin[i + 1]``.
    """

    __slots__ = ("begin", "end")

    def __init__(self, begin: Times, end: Times) -> None:
        """Takes arrays that are sorted and disjoint already; others go through :func:`union`."""
        self.begin = begin
        self.end = end

    def __len__(self) -> int:
        return len(self.begin)

    def pairs(self) -> list[tuple[int, int]]:
        """The intervals as (begin, end)."""
        return list(zip(self.begin.tolist(), self.end.tolist(), strict=True))

    @property
    def length(self) -> int:
        """Nanoseconds in the set."""
        return int((self.end - self.begin).sum())

    def within(self, begin: int, end: int) -> Intervals:
        """The part of the set in [begin, end)."""
        first = int(np.searchsorted(self.end, begin, side="right"))
        last = int(np.searchsorted(self.begin, end, side="left"))
        if first >= last:
            return EMPTY
        return Intervals(
            np.maximum(self.begin[first:last], begin), np.minimum(self.end[first:last], end)
        )

    def gaps(self, begin: int, end: int) -> Intervals:
        """The parts of [begin, end) that are not in the set."""
        inside = self.within(begin, end)
        begins = np.concatenate([np.array([begin], np.int64), inside.end])
        ends = np.concatenate([inside.begin, np.array([end], np.int64)])
        keep = begins < ends
        return Intervals(begins[keep], ends[keep])

    def __and__(self, other: Intervals) -> Intervals:
        if not len(self) or not len(other):
            return EMPTY
        # Pairs that overlap: for each of our intervals, the range of theirs that end after its
        # begin and begin before its end.
        first = np.searchsorted(other.end, self.begin, side="right")
        last = np.searchsorted(other.begin, self.end, side="left")
        counts = np.maximum(last - first, 0)
        ours = np.repeat(np.arange(len(self)), counts)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        theirs = np.repeat(first, counts) + offsets
        return Intervals(
            np.maximum(self.begin[ours], other.begin[theirs]),
            np.minimum(self.end[ours], other.end[theirs]),
        )

    def __sub__(self, other: Intervals) -> Intervals:
        if not len(self) or not len(other):
            return self
        low, high = int(self.begin[0]), int(self.end[-1])
        return self & other.gaps(low, high)

    def __or__(self, other: Intervals) -> Intervals:
        return union(
            np.concatenate([self.begin, other.begin]), np.concatenate([self.end, other.end])
        )


def union(begin: Times, end: Times) -> Intervals:
    """The union of intervals in any order, overlapping or not; empty ones are dropped."""
    keep = end > begin
    begin, end = begin[keep], end[keep]
    if not len(begin):
        return EMPTY
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    is_new = np.concatenate([np.array([True]), begin[1:] > reach[:-1]])
    last = np.concatenate([is_new[1:], np.array([True])])
    return Intervals(begin[is_new], reach[last])


def of_pairs(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """The union of intervals given as (begin, end)."""
    array = np.array(list(pairs), np.int64).reshape(-1, 2)
    return union(array[:, 0], array[:, 1])


def united(sets: Iterable[Intervals]) -> Intervals:
    """The union of the sets."""
    return functools.reduce(operator.or_, sets, EMPTY)


EMPTY = Intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))
