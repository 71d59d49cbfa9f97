"""A rank's spans as columns, by the resource that they occupy; every trace is read into these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hytrain.formats.trace_file import TraceHeader
from hytrain.tools.trace.intervals import Intervals, union
from hytrain.tools.trace.kinds import COMPUTE, GPU_UPDATE

NONE: Final = -1
"""Stands for a layer, chunk, step or number that is not named or not known."""


@dataclass(slots=True, eq=False)
class Span:
    """One span, before it becomes a row; times in nanoseconds."""

    begin: int
    end: int
    name: str
    layer: int = NONE
    chunk: int = NONE
    step: int = NONE
    size: float = 0.0
    """Bytes moved; for an update, those that DRAM reads and writes; 0 if unknown."""
    parameters: float = 0.0
    threads: int = 0
    """Threads that worked on it; 0 if unknown."""
    lane: int = 0
    """The stream or thread, if a resource has several."""
    detail: str = ""
    """Pass of compute, task of an update, kind of collective, Python line of a synchronization."""
    launched: int = NONE
    """When the host had launched it, at the latest its begin; NONE if unknown."""
    slot: int = NONE
    """Number of the pinned slot into which a gradient is copied."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows by ascending begin, then end; columns are arrays [n] named as in :class:`Span`."""

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    name: NDArray[np.object_]
    layer: NDArray[np.int64]
    chunk: NDArray[np.int64]
    step: NDArray[np.int64]
    size: NDArray[np.float64]
    parameters: NDArray[np.float64]
    threads: NDArray[np.int64]
    lane: NDArray[np.int64]
    detail: NDArray[np.object_]
    launched: NDArray[np.int64]
    slot: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.begin)

    def select(self, mask: NDArray[Any]) -> Spans:
        """The rows that a mask or indices choose; indices must ascend."""
        return Spans(*(getattr(self, column.name)[mask] for column in fields(self)))

    def covered(self) -> Intervals:
        """The time in which any of the spans runs."""
        return union(self.begin, self.end)


_KINDS: Mapping[Any, Any] = {"int": np.int64, "float": np.float64, "str": object}


def table(rows: Sequence[Span]) -> Spans:
    """The rows as columns, sorted by begin, then end."""
    columns = {
        each.name: np.array([getattr(row, each.name) for row in rows], _KINDS[each.type])
        for each in fields(Span)
    }
    order = np.lexsort((columns["end"], columns["begin"]))
    return Spans(**{name: column[order] for name, column in columns.items()})


@dataclass(frozen=True, slots=True)
class Step:
    """A step: the time from the end of the step before to its own end."""

    number: int
    begin: int
    end: int
    gpu_joules: float | None = None
    cpu_joules: float | None = None
    """Energy of the rank's GPU, and of the host's processors; None if not read."""

    @property
    def length(self) -> int:
        """The step's duration in nanoseconds."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank did, on the clock of rank 0."""

    rank: int
    path: Path
    steps: tuple[Step, ...]
    spans: Mapping[str, Spans]
    """The spans of each of :data:`~hytrain.tools.trace.kinds.RESOURCES`."""
    header: TraceHeader | None = None
    """None for a foreign trace."""
    world_size: int = 1
    """The run's world size; 1 if the trace does not say."""
    unknown: tuple[str, ...] = ()
    """Sentences about what this trace cannot tell."""
    are_kernels: bool = False
    """Whether compute was recorded as kernels, not as layers timed by events."""
    has_gpu: bool = True
    """Whether a GPU was recorded; else the CPU's forward and backward stand for its compute."""

    def __getitem__(self, resource: str) -> Spans:
        return self.spans[resource]

    def busy(self) -> Intervals:
        """The time in which the GPU computes: forward, backward, updates, anything unknown."""
        return self.spans[COMPUTE].covered() | self.spans[GPU_UPDATE].covered()
