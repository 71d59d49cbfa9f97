"""A trace as rows of bars, in levels of detail: what the pictures draw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.accounts import StepAccount
from hytrain.tools.trace.intervals import Intervals
from hytrain.tools.trace.palette import LEGEND, legend_of, legend_of_cause
from hytrain.tools.trace.spans import RankTrace, Span, Spans, table

IDLE: Final = "GPU waits for"
MOST_BARS: Final = 1_000_000
"""Of a page; above it the shortest functions are left out."""
_FEW: Final = 4096
"""Bars of a row that need no levels."""
_FIRST_BINS: Final = 2048
_MOST_BINS: Final = 1 << 17
_MOST_DEPTH: Final = 5
_ROWS: Final = (
    (kinds.COMPUTE, "GPU compute"),
    (kinds.GPU_UPDATE, "GPU update"),
    (kinds.COMMUNICATION, "communication"),
    (kinds.D2H, "D2H: gradients"),
    (kinds.H2D, "H2D: weights"),
    (kinds.CPU_UPDATE, "CPU Adam"),
    (kinds.WAIT, "waits of forward"),
    (kinds.SYNC, "host waits"),
    (kinds.DATA, "data loading"),
    (kinds.PHASE, "host"),
    (kinds.PYTHON, "Python"),
)
_HIDES: Final = (kinds.COMMUNICATION, kinds.D2H, kinds.H2D, kinds.CPU_UPDATE)


@dataclass(frozen=True, slots=True)
class Level:
    """Equal bins over a row's whole time."""

    covered: NDArray[np.uint8]
    """Of each bin the share that bars cover, of 255."""
    colour: NDArray[np.uint8]
    """The legend that covers most of it."""


@dataclass(frozen=True, slots=True)
class Row:
    """Bars that do not overlap, by begin."""

    label: str
    bars: Spans
    colour: NDArray[np.uint8]
    """Index into LEGEND."""
    hidden: NDArray[np.uint8]
    """Percent of each bar under GPU compute; 255 where that says nothing."""
    levels: tuple[Level, ...] = ()
    """Coarsest first; each has four times the bins of the one before."""


def rows_of(rank: RankTrace, steps: Sequence[StepAccount], begin: int, end: int) -> list[Row]:
    """All rows of a rank between two times, from top to bottom; empty ones are left out."""
    rows = [_idle_row(steps)]
    busy = rank.busy()
    for resource, label in _ROWS:
        spans = rank[resource]
        spans = spans.select((spans.end > begin) & (spans.begin < end))
        details = spans.detail.tolist()
        colours = {one: LEGEND.index(legend_of(resource, one)) for one in set(details)}
        colour = np.array([colours[one] for one in details], np.uint8)
        hidden = np.full(len(spans), 255, np.uint8)
        if resource in _HIDES:
            hidden = _hidden(spans, busy)
        for number, chosen in enumerate(_without_overlap(spans)):
            name = label if number == 0 else f"{label} {number + 1}"
            rows.append(Row(name, spans.select(chosen), colour[chosen], hidden[chosen]))
    return [row for row in rows if len(row.bars)]


def _idle_row(steps: Sequence[StepAccount]) -> Row:
    blames = [blame for one in steps for blame in one.idle]
    names = [
        Span(b.begin, b.end, b.cause, layer=b.layer, step=one.step.number, detail=b.detail)
        for one in steps
        for b in one.idle
    ]
    colour = np.array([LEGEND.index(legend_of_cause(b.cause)) for b in blames], np.uint8)
    return Row(IDLE, table(names), colour, np.full(len(names), 255, np.uint8))


def _hidden(spans: Spans, busy: Intervals) -> NDArray[np.uint8]:
    first, last = (_covered_before(busy.begin, busy.end, t) for t in (spans.begin, spans.end))
    under = last - first
    return np.round(100 * under / np.maximum(spans.end - spans.begin, 1)).astype(np.uint8)


def _covered_before(
    begin: NDArray[np.int64], end: NDArray[np.int64], wanted: NDArray[Any]
) -> NDArray[np.float64]:
    """At each time how much of disjoint intervals lies before it."""
    if not len(begin):
        return np.zeros(len(wanted))
    times = np.column_stack([begin, end]).ravel()
    total = np.cumsum(end - begin)
    before = np.column_stack([total - (end - begin), total]).ravel()
    return np.interp(wanted, times, before)


def _without_overlap(spans: Spans) -> Iterator[NDArray[np.intp]]:
    """The rows of spans that can share a line; what is nested deeper than a few is left out."""
    if not len(spans):
        return
    begins, ends = spans.begin, spans.end
    if (begins[1:] >= ends[:-1]).all():
        yield np.arange(len(spans))
        return
    free = [np.iinfo(np.int64).min] * _MOST_DEPTH
    chosen: list[list[int]] = [[] for _ in free]
    for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        for depth, time in enumerate(free):
            if time <= begin:
                free[depth] = end
                chosen[depth].append(number)
                break
    for numbers in chosen:
        if numbers:
            yield np.array(numbers)


def with_levels(row: Row, begin: int, end: int) -> Row:
    """The row with what is drawn where its bars are narrower than pixels."""
    if len(row.bars) <= _FEW:
        return row
    levels: list[Level] = []
    bins = _FIRST_BINS
    while bins <= _MOST_BINS and bins < 4 * len(row.bars):
        levels.append(_level(row, begin, end, bins))
        bins *= 4
    return Row(row.label, row.bars, row.colour, row.hidden, tuple(levels))


def _level(row: Row, begin: int, end: int, bins: int) -> Level:
    edges = np.linspace(begin, end, bins + 1)
    width = (end - begin) / bins
    whole = np.zeros(bins)
    most = np.zeros(bins)
    colour = np.zeros(bins, np.uint8)
    for one in np.unique(row.colour):
        bars = row.bars.select(row.colour == one)
        covered = np.diff(_covered_before(bars.begin, bars.end, edges))
        whole += covered
        colour[covered > most] = one
        most = np.maximum(most, covered)
    shares = np.clip(np.ceil(whole / width * 255), 0, 255).astype(np.uint8)
    return Level(shares, colour)


def thinned(rows: Sequence[Row], most: int = MOST_BARS) -> tuple[list[Row], int]:
    """Rows with that many bars in all at most, and how many were left out: the shortest first, of
    the rows with the most."""
    total = sum(len(row.bars) for row in rows)
    if total <= most:
        return list(rows), 0
    share = most / total
    kept: list[Row] = []
    for row in rows:
        number = len(row.bars)
        if number <= _FEW:
            kept.append(row)
            continue
        lengths = row.bars.end - row.bars.begin
        longest = np.sort(np.argsort(-lengths, kind="stable")[: max(_FEW, int(number * share))])
        kept.append(
            Row(
                *(row.label, row.bars.select(longest), row.colour[longest], row.hidden[longest]),
                row.levels,
            )
        )
    return kept, total - sum(len(row.bars) for row in kept)
