"""Memory of this process and of its machine, on the host and on the GPU."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import torch

from experiments.common.records import Json


def _kilobyte_fields(path: str) -> dict[str, int]:
    """The `Name:   123 kB` lines of a file under /proc, in bytes."""
    fields = {}
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host bytes in use now."""

    rss_bytes: int
    machine_used_bytes: int
    """Used by the whole machine: page-locked memory counts here even if a driver's mapping
    keeps it out of the process's resident set."""


def host_memory() -> HostMemory:
    """Reads the host memory in use from /proc."""
    status = _kilobyte_fields("/proc/self/status")
    machine = _kilobyte_fields("/proc/meminfo")
    return HostMemory(
        rss_bytes=status["VmRSS"],
        machine_used_bytes=machine["MemTotal"] - machine["MemAvailable"],
    )


class HostMemorySampler:
    """Samples the host memory of the measured steps in a thread of its own.

    The peak that the kernel keeps (VmHWM) includes what building the model needed briefly, so the
    peak of the steps has to be sampled.
    """

    def __init__(self, interval_seconds: float = 0.25) -> None:
        self._interval = interval_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-memory", daemon=True)
        self.rss_bytes = 0
        self.machine_bytes = 0

    def _sample(self) -> None:
        now = host_memory()
        self.rss_bytes = max(self.rss_bytes, now.rss_bytes)
        self.machine_bytes = max(self.machine_bytes, now.machine_used_bytes)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def __enter__(self) -> HostMemorySampler:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()


def reset_gpu_peak(device: str) -> None:
    """Starts a new peak: memory that building the model needed briefly is not a step's."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def gpu_memory(device: str) -> Json:
    """Peaks since the last reset, and what the driver says is in use; empty without a GPU."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
    }
