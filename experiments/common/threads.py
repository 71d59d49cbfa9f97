"""The number of CPU threads that a system's update uses, chosen by trying."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from experiments.common.records import Json
from experiments.common.timing import Stepper

TRIES = 2
"""Steps for each candidate; the faster one counts."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def candidates_for(asked: tuple[int, ...], cores: int) -> list[int]:
    """The counts worth trying on this machine: none above its cores, at least one."""
    return sorted({count for count in asked if count <= cores}) or [cores]


def _openmp_libraries() -> list[str]:
    """Paths of the OpenMP run-times loaded into this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    return sorted(p for p in paths if "libgomp" in p or "libiomp" in p or "libomp" in p)


def set_threads(count: int) -> None:
    """Set the count for torch and for extensions, whose OpenMP may be another copy than torch's."""
    torch.set_num_threads(count)
    for path in _openmp_libraries():
        ctypes.CDLL(path).omp_set_num_threads(count)


def choose_threads(stepper: Stepper) -> Json:
    """Try the system's candidates and keep the fastest; empty where the system decides itself."""
    asked = stepper.system.thread_candidates
    if not asked:
        return {}
    candidates = candidates_for(asked, usable_cores())
    seconds: dict[int, float] = {}
    if len(candidates) > 1:
        for count in candidates:
            set_threads(count)
            seconds[count] = min(stepper.timed_step() for _ in range(TRIES))
            print(f"{count} threads: {seconds[count]:.3f} s", flush=True)
    best = min(seconds, key=lambda count: seconds[count]) if seconds else candidates[0]
    set_threads(best)
    return {"threads": best, "tried_seconds": {str(k): v for k, v in seconds.items()}}
