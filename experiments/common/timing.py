"""Timing of training steps in windows that are not disturbed from inside."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator

import torch

from experiments.common.memory import HostMemorySampler, reset_gpu_peak
from experiments.common.model import Batch
from experiments.common.records import Json, Measurement
from experiments.common.systems.base import System
from hytrain.hardware.energy import EnergyMeter

MIN_WARMUP = 2
"""Steps before a slow system is timed; the first step of most systems allocates and calibrates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What the measured steps took."""

    window_seconds: tuple[float, ...]
    """For each window, the seconds of a step in it."""
    steps: int
    """Steps in a window."""
    host_step_seconds: tuple[float, ...]
    """For each step, the time between two returns of the step on the launching thread."""
    drain_seconds: float
    """After the last window, until every update is finished and published."""
    losses: tuple[float, ...]
    """Of all steps, warm-up included."""
    observations: tuple[Json, ...]
    """What the system says about its measured steps."""
    warmup_seconds: tuple[float, ...]
    host_rss_bytes: int
    host_machine_used_bytes: int
    gpu_joules: float | None = None
    """Of the GPU, a step; None where it cannot be read."""
    cpu_joules: float | None = None
    """Of the host's processors, a step, whatever else ran there included; None as above."""

    @property
    def step_seconds(self) -> float:
        """The median of the windows."""
        return statistics.median(self.window_seconds)

    @property
    def total_seconds(self) -> float:
        """All windows together."""
        return sum(self.window_seconds) * self.steps


def synchronize(device: str) -> None:
    """Wait for the GPU, where there is one."""
    if device == "cuda":
        torch.cuda.synchronize()


class Stepper:
    """Steps a system through the batches, and keeps losses without waiting for them."""

    def __init__(self, system: System, batches: list[Batch], device: str) -> None:
        self.system = system
        self.device = device
        self._batches: Iterator[Batch] = itertools.cycle(batches)
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One step; returns when the launching thread is free, not when the GPU is."""
        self._losses.append(self.system.step(next(self._batches)))

    def timed_step(self) -> float:
        """One step with a wait before and after it."""
        synchronize(self.device)
        begin = time.perf_counter()
        self.step()
        synchronize(self.device)
        return time.perf_counter() - begin

    def losses(self) -> tuple[float, ...]:
        """Reads the losses; waits for the GPU."""
        return tuple(float(loss) for loss in self._losses)


def warm_up(stepper: Stepper, plan: Measurement) -> list[float]:
    """Step until warm; a slow system is warm after MIN_WARMUP steps."""
    seconds: list[float] = []
    while len(seconds) < plan.warmup:
        seconds.append(stepper.timed_step())
        print(f"warm-up step {len(seconds)}: {seconds[-1]:.3f} s", flush=True)
        if len(seconds) >= MIN_WARMUP and seconds[-1] > plan.slow_seconds:
            break
    return seconds


def measure(stepper: Stepper, plan: Measurement, warmup_seconds: list[float]) -> Timing:
    """Measure `plan.windows` windows that follow one another without a gap.

    There is one wait at each window's end and none inside. A system that updates behind the next
    forward pass has work in flight at a window's end; it had as much in flight at its beginning,
    so nothing is hidden. What is in flight after the last window is reported as the drain.
    """
    slow = bool(warmup_seconds) and warmup_seconds[-1] > plan.slow_seconds
    steps = min(plan.steps, plan.slow_steps) if slow else plan.steps
    observations: dict[int, Json] = {}
    stamps: list[float] = []
    reset_gpu_peak(stepper.device)
    synchronize(stepper.device)
    meter = EnergyMeter(torch.device(stepper.device))
    energy_before = meter.read()
    with HostMemorySampler() as sampler:
        ends = [time.perf_counter()]
        stamps.append(ends[0])
        for _ in range(plan.windows):
            for _ in range(steps):
                stepper.step()
                stamps.append(time.perf_counter())
                _note(stepper.system, observations)
            synchronize(stepper.device)
            ends.append(time.perf_counter())
        energy = meter.read().since(energy_before)
        stepper.system.drain()
        synchronize(stepper.device)
        drained = time.perf_counter()
    _note(stepper.system, observations)
    measured = sorted(observations)[-plan.windows * steps :]
    return Timing(
        window_seconds=tuple((b - a) / steps for a, b in itertools.pairwise(ends)),
        steps=steps,
        host_step_seconds=tuple(b - a for a, b in itertools.pairwise(stamps)),
        drain_seconds=drained - ends[-1],
        losses=stepper.losses(),
        observations=tuple(observations[step] for step in measured),
        warmup_seconds=tuple(warmup_seconds),
        host_rss_bytes=sampler.rss_bytes,
        host_machine_used_bytes=sampler.machine_used_bytes,
        gpu_joules=_a_step(energy.gpu_joules, plan.windows * steps),
        cpu_joules=_a_step(energy.cpu_joules, plan.windows * steps),
    )


def _a_step(joules: float | None, steps: int) -> float | None:
    return None if joules is None else joules / steps


def _note(system: System, observations: dict[int, Json]) -> None:
    """Keep the newest observation of each step: a step's numbers settle after it has returned."""
    row = system.observe()
    if row is not None:
        observations[int(row["step"])] = row
