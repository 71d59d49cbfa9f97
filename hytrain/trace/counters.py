"""Memory and power while steps are recorded, read by a thread a few times a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

logger = logging.getLogger(__name__)

SECONDS = 0.05
"""Time between readings: each takes tenths of a millisecond, and holds the interpreter for less."""


class Sample(NamedTuple):
    """A counter's value from a time on."""

    name: str
    at_ns: float
    value: float


class CounterSampler:
    """Reads counters until :meth:`stop`."""

    def __init__(self, readers: Mapping[str, Callable[[], float | None]], most: int) -> None:
        """``readers``: a counter's name -> what reads it, or returns None if it cannot now.
        ``most``: number of samples that are kept, the newest.
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
        for name, read in list(self._readers.items()):
            try:
                value = read()
            except Exception as error:  # else the thread would end, and all counters with it
                logger.warning("the counter %s of the trace ends: %s", name, error)
                del self._readers[name]
                continue
            if value is not None:
                self.samples.append(Sample(name, time.monotonic_ns(), value))
        del self.samples[: -self._most]

    def stop(self) -> None:
        """Ends the thread; the samples stay."""
        self._ends.set()
        self._thread.join()
