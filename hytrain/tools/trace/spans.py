"""A rank's spans by what they occupy, as columns: what every trace is read into."""

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
"""Of a layer, chunk or step that a span does not name."""


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
    """Bytes moved; of an update those of DRAM; 0 if unknown."""
    parameters: float = 0.0
    threads: int = 0
    """That worked on it; 0 if unknown."""
    lane: int = 0
    """The stream or thread, where a resource has several."""
    detail: str = ""
    """Pass of compute, task of an update, collective, Python line of a synchronization."""
    launched: int = NONE
    """When the host had launched it: its begin at the latest."""
    slot: int = NONE
    """Pinned memory that a gradient is copied into."""


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
        """The time in which any of them runs."""
        return union(self.begin, self.end)


_KINDS: Mapping[Any, Any] = {"int": np.int64, "float": np.float64, "str": object}


def table(rows: Sequence[Span]) -> Spans:
    """The rows as columns, sorted."""
    columns = {
        each.name: np.array([getattr(row, each.name) for row in rows], _KINDS[each.type])
        for each in fields(Span)
    }
    order = np.lexsort((columns["end"], columns["begin"]))
    return Spans(**{name: column[order] for name, column in columns.items()})


@dataclass(frozen=True, slots=True)
class Step:
    """From the end of the step before to the end of this one."""

    number: int
    begin: int
    end: int
    gpu_joules: float | None = None
    cpu_joules: float | None = None
    """Of the rank's GPU and the host's processors; None where they were not read."""

    @property
    def length(self) -> int:
        """In nanoseconds."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank did, on the clock of rank 0."""

    rank: int
    path: Path
    steps: tuple[Step, ...]
    spans: Mapping[str, Spans]
    """Of every one of :data:`~hytrain.tools.trace.kinds.RESOURCES`."""
    header: TraceHeader | None = None
    """None for a foreign trace."""
    world_size: int = 1
    """Of the run, as far as the trace says."""
    unknown: tuple[str, ...] = ()
    """Sentences about what this trace cannot tell."""
    are_kernels: bool = False
    """Compute is kernels, not layers timed by events."""
    has_gpu: bool = True
    """Else the CPU's forward and backward stand for its compute."""

    def __getitem__(self, resource: str) -> Spans:
        return self.spans[resource]

    def busy(self) -> Intervals:
        """When the GPU computes: forward, backward, anything unknown, updates."""
        return self.spans[COMPUTE].covered() | self.spans[GPU_UPDATE].covered()
