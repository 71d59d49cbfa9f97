"""A trace as rows of coloured bars, which the HTML page draws."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hytrain.tools.trace import causes, kinds
from hytrain.tools.trace.intervals import Intervals
from hytrain.tools.trace.spans import RankTrace, Span, Spans, table
from hytrain.tools.trace.step_times import StepTimes

IDLE: Final = "GPU waits for"
_MOST_DEPTH: Final = 5
_ROWS: Final = (
    (kinds.COMPUTE, "GPU compute"),
    (kinds.GPU_UPDATE, "GPU update"),
    (kinds.COMMUNICATION, kinds.COMMUNICATION),
    (kinds.D2H, kinds.D2H),
    (kinds.H2D, kinds.H2D),
    (kinds.CPU_UPDATE, "CPU Adam"),
    (kinds.WAIT, "waits of forward"),
    (kinds.SYNC, "host waits"),
    (kinds.DATA, "data loading"),
    (kinds.PHASE, "host"),
    (kinds.PYTHON, "Python"),
)
_HIDES: Final = (kinds.COMMUNICATION, kinds.D2H, kinds.H2D, kinds.CPU_UPDATE)

COLOURS: Final[Mapping[str, str]] = {
    kinds.FORWARD: "#5aa9e6",
    kinds.BACKWARD: "#2f6db5",
    kinds.RECOMPUTE: "#7d6fd0",
    kinds.OTHER: "#8d9bab",
    kinds.GPU_UPDATE: "#16a394",
    kinds.COMMUNICATION: "#b768c9",
    kinds.D2H: "#e6a532",
    kinds.H2D: "#d9772b",
    kinds.CPU_UPDATE: "#58a945",
    "host": "#8695a8",
    "host waits": "#b9a48c",
    causes.SLOW_RANK: "#e5383b",
    causes.CLIPPING: "#0f7a4d",
    causes.LATE_GRADIENT_COPY: "#cfae5d",
    causes.LATE_WEIGHT_COPY: "#a8552a",
    causes.STARVED_CPU: "#a3c93a",
    causes.LATE_COLLECTIVE: "#7b2f8f",
    causes.LAUNCH: "#f277a6",
    causes.DATA_LOADING: "#c2255c",
    causes.SYNCHRONIZATION: "#ff8a65",
    causes.HOST_CODE: "#a1467e",
    causes.HAND_OVER: "#4fb6c6",
    causes.KERNEL_GAPS: "#d3b8ae",
    causes.UNRESOLVED: "#6b7079",
}
"""Legend entry -> colour; all are legible on light and dark pages."""

LEGEND: Final = tuple(COLOURS)


def legend_of(resource: str, detail: str) -> str:
    """A span's entry in the legend."""
    if resource == kinds.COMPUTE:
        return detail if detail in COLOURS else kinds.OTHER
    if resource in (kinds.WAIT, kinds.SYNC):
        return "host waits"
    return resource if resource in COLOURS else "host"


def legend_of_cause(cause: str) -> str:
    """The legend's entry for idle time: that of what is waited for."""
    return kinds.CPU_UPDATE if cause == causes.CPU_ADAM else cause


@dataclass(frozen=True, slots=True)
class Row:
    """A row of bars that do not overlap, by ascending begin."""

    label: str
    bars: Spans
    colour: NDArray[np.uint8]
    """Index into LEGEND."""
    hidden: NDArray[np.uint8]
    """Percent of each bar that is hidden under compute; 255 in rows for which this is undefined."""


def rows_of(rank: RankTrace, steps: Sequence[StepTimes], begin: int, end: int) -> list[Row]:
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


def _idle_row(steps: Sequence[StepTimes]) -> Row:
    blames = [blame for one in steps for blame in one.idle]
    names = [
        Span(b.begin, b.end, b.cause, layer=b.layer, step=one.step.number, detail=b.detail)
        for one in steps
        for b in one.idle
    ]
    colour = np.array([LEGEND.index(legend_of_cause(b.cause)) for b in blames], np.uint8)
    return Row(IDLE, table(names), colour, np.full(len(names), 255, np.uint8))


def _hidden(spans: Spans, busy: Intervals) -> NDArray[np.uint8]:
    if not len(busy):
        return np.zeros(len(spans), np.uint8)
    lengths = busy.end - busy.begin
    total = np.cumsum(lengths)
    # Busy time before each of its begins and ends, interpolated for the times between.
    times = np.column_stack([busy.begin, busy.end]).ravel()
    before = np.column_stack([total - lengths, total]).ravel()
    under = np.interp(spans.end, times, before) - np.interp(spans.begin, times, before)
    return np.round(100 * under / np.maximum(spans.end - spans.begin, 1)).astype(np.uint8)


def _without_overlap(spans: Spans) -> Iterator[NDArray[np.intp]]:
    """Yields, line by line, rows of spans that do not overlap; leaves out what nests too deeply."""
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
