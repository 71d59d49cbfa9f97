"""Memory and power while steps are recorded, read by a thread a few times a second."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

SECONDS = 0.05
"""Between two readings: they take tenths of a millisecond, with the interpreter held for less."""


class Sample(NamedTuple):
    """A counter's value from a time on."""

    name: str
    at_ns: float
    value: float


class CounterSampler:
    """Reads counters until :meth:`stop`."""

    def __init__(self, readers: Mapping[str, Callable[[], float | None]], most: int) -> None:
        """
        Args:
            readers: a counter's name -> what reads it; None where it cannot be told now.
            most: samples that are kept; the newest.
        """
        self._readers = dict(readers)
        self._most = most
        self.samples: list[Sample] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hytrain-trace", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._read()
        while not self._ends.wait(SECONDS):
            self._read()

    def _read(self) -> None:
        for name, read in self._readers.items():
            value = read()
            if value is not None:
                self.samples.append(Sample(name, time.monotonic_ns(), value))
        del self.samples[: -self._most]

    def stop(self) -> None:
        """Ends the thread; the samples stay."""
        self._ends.set()
        self._thread.join()


def growth_between(
    samples: list[Sample], name: str, begin_ns: float, end_ns: float
) -> float | None:
    """What a sum has grown by between two times, straight lines between its samples; or None."""
    points = [(sample.at_ns, sample.value) for sample in samples if sample.name == name]
    if len(points) < 2 or points[0][0] > end_ns or points[-1][0] < begin_ns:
        return None

    def value(at: float) -> float:
        after = next((i for i, (t, _) in enumerate(points) if t >= at), len(points) - 1)
        (t0, v0), (t1, v1) = points[max(0, after - 1)], points[max(1, after)]
        return v0 + (v1 - v0) * (at - t0) / (t1 - t0)

    return value(end_ns) - value(begin_ns)


def rates_of(samples: list[Sample], name: str, rate: str) -> list[Sample]:
    """How fast a sum grows, a second, between its samples, as a counter of its own."""
    points = [sample for sample in samples if sample.name == name]
    return [
        Sample(rate, b.at_ns, (b.value - a.value) / (b.at_ns - a.at_ns) * 1e9)
        for a, b in itertools.pairwise(points)
    ]
