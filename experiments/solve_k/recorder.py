"""The result file as it grows, and a guard that saves it before the host's memory is used up.

No torch here: it starts before torch is imported.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from experiments.common import records
from experiments.common.records import Json
from hytrain.kernels.host_limits import available_host_bytes

RUNNING = "running"
"""The status of a result that its process has not ended yet."""

HOST_MEMORY_LOW = "host memory low"

METRICS = "metrics.jsonl"
"""Beside the result: what `hytrain explain` reads."""

LOW_MEMORY_EXIT = 3


class Recorder:
    """Collects a process's result; the file always holds what has been measured so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._result: Json = {"status": RUNNING, "host": {}}

    def put(self, **values: object) -> None:
        """Sets fields."""
        with self._lock:
            self._result.update(values)
            records.write_json(self._path, self._result)

    def append(self, key: str, value: object) -> None:
        """Adds to a list."""
        with self._lock:
            self._result.setdefault(key, []).append(value)
            records.write_json(self._path, self._result)

    def host(self, moment: str, value: Json) -> None:
        """What the host's memory was at a moment; printed as well."""
        gib = {name: f"{number / 2**30:.1f}" for name, number in value.items()}
        print(f"host memory, {moment}, GiB: {gib}", flush=True)
        with self._lock:
            self._result["host"][moment] = value
            records.write_json(self._path, self._result)

    def metrics(self, lines: Iterable[Json]) -> None:
        """Writes the metrics file."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self._path.with_name(METRICS).write_text(text)


class HostMemoryGuard:
    """Ends the process when the host has almost no memory left.

    The kernel would otherwise choose a process to end, and not always this one.
    """

    def __init__(
        self,
        recorder: Recorder,
        floor_bytes: float,
        *,
        available: Callable[[], int] = available_host_bytes,
        leave: Callable[[int], None] = os._exit,
        interval_seconds: float = 0.2,
    ) -> None:
        self._recorder = recorder
        self._floor = floor_bytes
        self._available = available
        self._leave = leave
        self._interval = interval_seconds
        self._stop = threading.Event()
        self.least_bytes = available()
        self._thread = threading.Thread(target=self._run, name="host-memory-guard", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            now = self._available()
            self.least_bytes = min(self.least_bytes, now)
            if now < self._floor:
                self._recorder.put(status=HOST_MEMORY_LOW, host_available_bytes=now)
                print(f"{now} bytes of host memory left, less than {self._floor:.0f}: ending")
                sys.stdout.flush()
                self._leave(LOW_MEMORY_EXIT)
                return
