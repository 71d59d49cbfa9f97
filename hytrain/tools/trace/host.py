"""What a rank's host did while the GPU had nothing to do: loading, synchronizing, launching."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np

from hytrain.tools.trace import kinds
from hytrain.tools.trace.intervals import Intervals
from hytrain.tools.trace.spans import NONE, RankTrace, Spans

_LIBRARY: Final = re.compile(
    r"site-packages|dist-packages|/lib/python|<frozen|\btorch[/.]|<built-in"
)
_LOCATION: Final = re.compile(r"([^\s(/\\]+\.py)[(:](\d+)\)?(?::\s*(\S+))?")
_MOST_NAMED: Final = 0.5


class HostState(NamedTuple):
    """What the host did in [begin, end)."""

    begin: int
    end: int
    resource: str
    """DATA, SYNC, WAIT, PHASE (in forward, backward or step()), PYTHON (in none of these); in a
    foreign trace also CPU_UPDATE."""
    row: int
    """Row of the span among the rank's of that resource; NONE if in no span."""


class HostView:
    """Tells what a rank's host did in given intervals."""

    def __init__(self, rank: RankTrace) -> None:
        """Takes what the rank recorded of its host."""
        self._rank = rank
        # A foreign optimizer's update on the CPU is work of the host itself, not of a worker.
        updates = (kinds.CPU_UPDATE,) if rank.header is None else ()
        self._resources = (kinds.SYNC, kinds.WAIT, kinds.DATA, *updates, kinds.PHASE)
        self._covered: dict[str, Intervals] = {
            name: rank[name].covered() for name in self._resources
        }
        self._lines: dict[int, str] = {}

    @property
    def has_phases(self) -> bool:
        """Whether forward and backward of the host were recorded."""
        return any(name != "optimizer step" for name in set(self._rank[kinds.PHASE].name))

    def states(self, begin: int, end: int) -> list[HostState]:
        """Divides the interval into parts without gaps; a wait takes precedence over its phase."""
        states: list[HostState] = []
        rest = [(begin, end)]
        for resource in self._resources:
            left: list[tuple[int, int]] = []
            for low, high in rest:
                inside = self._covered[resource].within(low, high)
                for one, other in inside.pairs():
                    states.append(HostState(one, other, resource, self._row(resource, one)))
                left += self._covered[resource].gaps(low, high).pairs()
            rest = left
        states += [HostState(low, high, kinds.PYTHON, NONE) for low, high in rest]
        return sorted(states)

    def _row(self, resource: str, time: int) -> int:
        """The last span that begins at or before a time and still runs then."""
        spans = self._rank[resource]
        index = int(np.searchsorted(spans.begin, time, side="right")) - 1
        while index > 0 and spans.end[index] <= time:
            index -= 1
        return index

    def ended_between(self, resource: str, begin: int, end: int) -> int | None:
        """The last span of a resource that ends in [begin, end]; None if none does."""
        spans = self._rank[resource]
        rows = np.flatnonzero((spans.end >= begin) & (spans.end <= end)) if len(spans) else []
        return int(rows[np.argmax(spans.end[rows])]) if len(rows) else None

    def line_of_sync(self, row: int) -> str:
        """The Python line that synchronized: "train.py:31", or what is known of it."""
        if row not in self._lines:
            spans = self._rank[kinds.SYNC]
            line = spans.detail[row]
            frame = None if line else self._frame(spans, row)
            self._lines[row] = line or frame or spans.name[row]
        return self._lines[row]

    def _frame(self, spans: Spans, row: int) -> str | None:
        """The innermost function around a span, in its thread, that is not a library's."""
        python = self._rank[kinds.PYTHON]
        around = (python.begin <= spans.begin[row]) & (python.end >= spans.end[row])
        rows = np.flatnonzero(around & (python.lane == spans.lane[row]))
        names = [str(python.name[one]) for one in reversed(rows.tolist())]
        own = [name for name in names if not _LIBRARY.search(name) and _LOCATION.search(name)]
        return short_name(own[0]) if own else None

    def function_in(self, begin: int, end: int) -> str | None:
        """The innermost function or other Python span that covers at least half of an interval."""
        python = self._rank[kinds.PYTHON]
        if not len(python):
            return None
        overlap = np.minimum(python.end, end) - np.maximum(python.begin, begin)
        rows = np.flatnonzero(overlap >= (end - begin) * _MOST_NAMED)
        if not len(rows):
            return None
        lengths = (python.end - python.begin)[rows]
        return short_name(str(python.name[rows[int(np.argmin(lengths))]]))


def short_name(name: str) -> str:
    """A function with its file and line, without folders.

    >>> short_name("/home/me/train.py(31): main")
    'main (train.py:31)'
    >>> short_name("main (/home/me/train.py:31)")
    'main (train.py:31)'
    """
    match = _LOCATION.search(name)
    if match is None:
        return name
    function = match[3] or name.split(" (")[0]
    return f"{function} ({match[1]}:{match[2]})"
