"""A rank's process: measures one job, and keeps what it has measured as it goes.

    python -m experiments.common.worker JOB.json RESULT.json

The job's "worker" names a module with ``run(job, recorder)``. The result outlives whatever breaks;
no torch is imported here before that module is.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from experiments.common import records
from experiments.common.records import GIB, Json
from hytrain.kernels.host_limits import available_host_bytes

HOST_FLOOR_GIB = 2.0
LOW_MEMORY_EXIT = 3


class Recorder:
    """A process's result; its file always holds what has been measured so far."""

    def __init__(self, path: Path, until: float) -> None:
        """
        Args:
            path: the result's file.
            until: ``time.time`` at which the process is ended from outside.
        """
        self._path = path
        self._until = until
        self._begin = time.monotonic()
        self._lock = threading.Lock()  # the host memory guard writes, too
        self._result: Json = {"status": records.RUNNING}

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

    def reached(self, phase: str) -> None:
        """Records and prints a phase that has ended, with the seconds since the process began."""
        seconds = round(time.monotonic() - self._begin, 2)
        self.append("phases", [phase, seconds])
        print(f"{seconds:.1f} s: {phase}", flush=True)

    def seconds_left(self) -> float:
        """Seconds until the process is ended from outside."""
        return self._until - time.time()


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
        leave: Callable[[int], Any] = os._exit,
        interval_seconds: float = 0.2,
    ) -> None:
        self._recorder = recorder
        self._floor = floor_bytes
        self._available = available
        self._leave = leave
        self._stop = threading.Event()
        self._interval = interval_seconds
        self.least_bytes = available()
        self._thread = threading.Thread(target=self._run, name="host-memory-guard", daemon=True)

    def __enter__(self) -> HostMemoryGuard:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._recorder.put(host_available_least_bytes=self.least_bytes)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            now = self._available()
            self.least_bytes = min(self.least_bytes, now)
            if now < self._floor:
                self._recorder.put(status=records.HOST_MEMORY_LOW, host_available_bytes=now)
                print(f"{now} bytes of host memory left, less than {self._floor:.0f}", flush=True)
                self._leave(LOW_MEMORY_EXIT)
                return


def status_of(error: Exception) -> str:
    """The status that an error gives the job."""
    import torch

    from hytrain.errors import HyTrainError

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return records.OUT_OF_MEMORY
    is_refusal = isinstance(error, HyTrainError) and isinstance(error, ValueError)
    return records.REFUSED if is_refusal else records.FAILED


def end(code: int) -> NoReturn:
    """Ends this process as it is.

    Tearing down an interpreter with tens of GiB of page-locked memory can take longer than the
    measurement, and threads or process groups that other packages leave can keep it from ending.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: list[str]) -> int:
    """Measures the job; returns the exit status, and the result file says more."""
    job = records.read_json(Path(arguments[0]))
    recorder = Recorder(Path(arguments[1]), job["until"])
    try:
        with HostMemoryGuard(recorder, job.get("host_floor_gib", HOST_FLOOR_GIB) * GIB):
            importlib.import_module(job["worker"]).run(job, recorder)
        recorder.put(status=records.OK)
    except Exception as error:
        # The process boundary: the parent needs the log and the status, whatever went wrong.
        traceback.print_exc()
        recorder.put(status=status_of(error), error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    return 0


if __name__ == "__main__":
    end(main(sys.argv[1:]))
