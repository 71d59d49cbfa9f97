"""What was achieved of measured peaks, and the energy of a step, where it was recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hytrain.formats.trace_file import Peaks
from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.spans import RankTrace

DRAM: Final = "DRAM, CPU Adam"
D2H: Final = "copies to host"
H2D: Final = "copies to GPU"
CORES: Final = "cores, CPU Adam"
ADAM: Final = "CPU Adam"


@dataclass(frozen=True, slots=True)
class Rate:
    """While it ran, and its measured peak; None where the trace does not say."""

    name: str
    unit: str
    achieved: float | None
    peak: float | None
    busy_share: float
    """Of the steps' time, in which it ran."""

    @property
    def share(self) -> float | None:
        """Of the peak."""
        return self.achieved / self.peak if self.achieved and self.peak else None


def rates(rank: RankTrace) -> tuple[Rate, ...]:
    """Those of all recorded steps of a rank."""
    begin, end = rank.steps[0].begin, rank.steps[-1].end
    peaks = rank.header.peaks if rank.header is not None else Peaks()
    update = rank[kinds.CPU_UPDATE]
    found: list[Rate] = []
    for name, unit, spans, amount, peak in (
        (DRAM, "B/s", update, update.size, peaks.dram_bytes_per_s),
        (ADAM, "parameters/s", update, update.parameters, peaks.adam_parameters_per_s),
        (CORES, "cores", update, update.threads * (update.end - update.begin) * 1e-9, peaks.cores),
        (D2H, "B/s", rank[kinds.D2H], rank[kinds.D2H].size, peaks.d2h_bytes_per_s),
        (H2D, "B/s", rank[kinds.H2D], rank[kinds.H2D].size, peaks.h2d_bytes_per_s),
    ):
        chosen = (spans.begin >= begin) & (spans.begin < end)
        busy = spans.select(chosen).covered().length * 1e-9
        total = float(amount[chosen].sum())
        achieved = total / busy if busy > 0.0 and total > 0.0 else None
        if len(spans):
            found.append(Rate(name, unit, achieved, peak, busy / ((end - begin) * 1e-9)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules a step, the mean; None where there is no counter."""

    gpu: float | None
    cpu: float | None
    tokens_per_joule: float | None
    """Of what was counted."""


def energy(rank: RankTrace) -> Energy | None:
    """Of a step; None where none was recorded."""
    gpu, cpu = (
        _mean([getattr(step, key) for step in rank.steps]) for key in ("gpu_joules", "cpu_joules")
    )
    if gpu is None and cpu is None:
        return None
    total = (gpu or 0.0) + (cpu or 0.0)
    tokens = rank.header.tokens_per_step if rank.header is not None else None
    return Energy(gpu, cpu, tokens / total if tokens is not None and total > 0.0 else None)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
