"""Timing of training steps in windows that are not disturbed from inside."""

from __future__ import annotations

import ctypes
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.common.memory import HostMemorySampler, gpu_memory, reset_gpu_peak
from experiments.common.model import Batch
from experiments.common.records import Json
from hytrain.hardware.energy import EnergyMeter

SLOW_SECONDS, SLOW_STEPS, SLOW_WARMUP = 1.5, 2, 2
"""A system whose step takes longer gets windows of SLOW_STEPS steps, after SLOW_WARMUP steps."""
THREAD_TRIES = 2
"""Steps for each number of threads; the faster one counts."""


def synchronize(device: str) -> None:
    """Waits for the GPU, if there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


class Stepper:
    """Steps a system through the batches, and keeps losses without waiting for them.

    A step has ``accumulation`` micro-batches.
    """

    def __init__(
        self, system: Any, batches: list[Batch], device: str, accumulation: int = 1
    ) -> None:
        self.system = system
        self.device = device
        self._accumulation = accumulation
        self._batches: Iterator[Batch] = itertools.cycle(batches)
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Makes one step; returns when the launching thread is free, not when the GPU is."""
        batches = [next(self._batches) for _ in range(self._accumulation)]
        self._losses.append(self.system.step(batches))

    def timed_step(self, steps: int = 1) -> float:
        """Makes steps; returns seconds a step, with a wait before the first and after the last."""
        synchronize(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        return (time.perf_counter() - begin) / steps

    def losses(self) -> list[float]:
        """Reads the losses; waits for the GPU."""
        return [float(loss) for loss in self._losses]


def warm_up(stepper: Stepper, steps: int) -> list[float]:
    """Makes warm-up steps, SLOW_WARMUP of a slow system; returns the seconds of each."""
    seconds: list[float] = []
    while len(seconds) < steps:
        seconds.append(stepper.timed_step())
        print(f"warm-up step {len(seconds)}: {seconds[-1]:.3f} s", flush=True)
        if len(seconds) >= SLOW_WARMUP and seconds[-1] > SLOW_SECONDS:
            break
    return seconds


def measure(stepper: Stepper, *, windows: int, steps: int) -> Json:
    """Measures windows that follow one another without a gap.

    There is one wait at each window's end and none inside. A system that updates behind the next
    forward pass has work in flight at a window's end; it had as much in flight at its beginning,
    so nothing is hidden. What is in flight after the last window is reported as the drain.

    Returns:
        step_seconds (the median of the windows), window_seconds (of a step in each), losses (of all
        steps so far), observations (the system's statistics of its measured steps), host_bytes (the
        largest resident set), gpu (peaks), drain_seconds, gpu_joules and cpu_joules a step (None if
        they cannot be read; the processors' include whatever else ran there).
    """
    system, device = stepper.system, stepper.device
    observations: dict[int, Json] = {}

    def note() -> None:
        # The newest observation of each step: a step's numbers settle after it has returned.
        if (row := system.observe()) is not None:
            observations[int(row["step"])] = row

    reset_gpu_peak(device)
    synchronize(device)
    meter = EnergyMeter(torch.device(device))
    before = meter.read()
    with HostMemorySampler() as host:
        ends = [time.perf_counter()]
        for _ in range(windows):
            for _ in range(steps):
                stepper.step()
                note()
            synchronize(device)
            ends.append(time.perf_counter())
        energy = meter.read().since(before)
        system.drain()
        synchronize(device)
        drained = time.perf_counter()
    note()
    seconds = [(b - a) / steps for a, b in itertools.pairwise(ends)]
    rows = [observations[step] for step in sorted(observations)[-windows * steps :]]
    joules = {"gpu_joules": energy.gpu_joules, "cpu_joules": energy.cpu_joules}
    return {
        "step_seconds": statistics.median(seconds),
        "window_seconds": seconds,
        "drain_seconds": drained - ends[-1],
        "losses": stepper.losses(),
        "observations": rows,
        "host_bytes": host.rss_bytes,
        "host_machine_bytes": host.machine_bytes,
        "gpu": gpu_memory(device),
        **{k: None if v is None else v / (windows * steps) for k, v in joules.items()},
    }


def clipped_share(rows: list[Json]) -> float | None:
    """Share of the steps in which clipping acted, of those whose coefficient is known."""
    told = [row["clip_coefficient"] for row in rows if row.get("clip_coefficient") is not None]
    return sum(value < 1.0 for value in told) / len(told) if told else None


# -- threads of updates ------------------------------------------------------------------------


def set_threads(count: int) -> None:
    """Sets the count for torch and for extensions, whose OpenMP may be a copy of their own."""
    torch.set_num_threads(count)
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in maps if len(line.split(maxsplit=5)) == 6}
    for path in sorted(p for p in paths if any(n in p for n in ("libgomp", "libiomp", "libomp"))):
        ctypes.CDLL(path).omp_set_num_threads(count)


def choose_threads(stepper: Stepper) -> int | None:
    """Tries the system's candidates and keeps the fastest; None if the system decides itself."""
    asked = stepper.system.thread_candidates
    if not asked:
        return None
    cores = len(os.sched_getaffinity(0))
    candidates = sorted({count for count in asked if count <= cores}) or [cores]
    seconds: dict[int, float] = {}
    for count in candidates if len(candidates) > 1 else ():
        set_threads(count)
        seconds[count] = min(stepper.timed_step() for _ in range(THREAD_TRIES))
        print(f"{count} threads: {seconds[count]:.3f} s", flush=True)
    best = min(seconds, key=lambda count: seconds[count]) if seconds else candidates[0]
    set_threads(best)
    return best
