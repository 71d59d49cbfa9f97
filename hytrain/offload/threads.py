"""How many threads the CPU kernel gets: a short calibration where the user gives none."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import cache

import torch

from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit_then_preview
from hytrain.kernels.host_memory import taking_host_memory
from hytrain.kernels.moments import Rounding
from hytrain.model.moment_format import MomentFormat

_ELEMENTS = 1 << 24
"""256 MiB of traffic a pass: beyond most caches, short enough to be repeated at start."""
_REPEATS = 5


def candidates(cores: int) -> list[int]:
    """Thread counts worth trying: the kernel is bound by memory, not by cores."""
    if cores <= 2:
        return [cores]  # two are used in full: the kernel alone needs both
    return sorted({max(1, cores // 2), max(1, cores * 5 // 8), max(1, cores * 3 // 4), cores - 1})


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """Threads of the kernel, and what one parameter takes it with them.

    Attributes:
        num_threads: how many.
        seconds_per_parameter: of commit_then_preview, with nothing else running.
        candidates: the counts that were measured, rising.
    """

    num_threads: int
    seconds_per_parameter: float
    candidates: tuple[int, ...]


@cache
def choose_threads(cores: int, given: int | None, moments: MomentsName = FP32) -> ThreadChoice:
    """As :func:`measure_threads`, which a process does once: its machine stays the same."""
    return measure_threads(cores, given, moments)


def measure_threads(cores: int, given: int | None, moments: MomentsName = FP32) -> ThreadChoice:
    """The fewest threads within 3 % of the fastest count, measured on the real kernel.

    Args:
        cores: this rank's, with those of other ranks that measure at the same time left out.
        given: a count that the user chose; only its speed is measured.
        moments: how Adam's moments are kept.

    Raises:
        HostMemoryError: the 256 MiB that it takes cannot be had.

    The launching thread and autograd's thread need a core as well; they get it because the count
    never exceeds the cores but one (but two cores are used in full).
    """
    counts = [given] if given is not None else candidates(cores)
    with taking_host_memory("measuring the CPU's update, for some milliseconds", 16 * _ELEMENTS):
        how = MomentFormat(moments)
        state = how.split(torch.zeros(how.state_bytes(_ELEMENTS), dtype=torch.uint8), _ELEMENTS)
        gradient = torch.zeros(_ELEMENTS, dtype=torch.bfloat16)
        out = torch.empty(_ELEMENTS, dtype=torch.bfloat16)
    record = Gradient(gradient, 1.0, AdamHyper(lr=1e-3))
    times: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(_REPEATS + 1):
        for count in counts:
            begin = time.perf_counter()
            commit_then_preview(
                *state, record, record, rounding=Rounding(0, 0), out=out, num_threads=count
            )
            if repeat:  # the first round touches the pages
                times[count].append(time.perf_counter() - begin)
    medians = {count: statistics.median(values) for count, values in times.items()}
    best = min(medians.values())
    count = min(count for count, value in medians.items() if value <= best * 1.03)
    return ThreadChoice(count, medians[count] / _ELEMENTS, tuple(counts))
