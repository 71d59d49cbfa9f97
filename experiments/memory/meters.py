"""Meters of a phase's memory and time on host and GPU, and of the disk's speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from experiments.common.memory import HostMemorySampler, host_memory
from experiments.common.records import Json
from experiments.common.timing import synchronize

_SAMPLE_SECONDS = 0.005
_BLOCK = os.urandom(1 << 20)


class PinnedBytes:
    """Counts bytes that are registered with the driver, in the place of torch's cudart."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.peak = 0
        if torch.cuda.is_available():
            self._real: Any = torch.cuda.cudart()
            torch.cuda.cudart = lambda: self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        """Registers as the driver does, and counts the bytes."""
        result = self._real.cudaHostRegister(address, num_bytes, flags)
        if int(result) == 0:
            self._sizes[address] = num_bytes
            self.peak = max(self.peak, self.now)
        return result

    def cudaHostUnregister(self, address: int) -> Any:
        """Unregisters as the driver does, and no longer counts the bytes."""
        self._sizes.pop(address, None)
        return self._real.cudaHostUnregister(address)

    @property
    def now(self) -> int:
        """Bytes registered at the moment."""
        return sum(self._sizes.values())


class PhaseMeter:
    """Measures peaks of phases; resident memory is over that when the meter was made."""

    def __init__(self, device: str, pinned: PinnedBytes) -> None:
        self._device = device
        self._pinned = pinned
        self._before = host_memory().rss_bytes
        self.peaks: Json = {}

    def measure(self, name: str, action: Callable[[], object]) -> float:
        """Runs a phase and returns its seconds."""
        self._pinned.peak = self._pinned.now
        synchronize(self._device)
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with HostMemorySampler(_SAMPLE_SECONDS) as host:
            action()
            synchronize(self._device)
        seconds = time.perf_counter() - begin
        on_gpu = torch.cuda.max_memory_allocated() if self._device == "cuda" else None
        self.peaks[name] = {
            **{"rss_bytes": host.rss_bytes - self._before, "pinned_bytes": self._pinned.peak},
            **{"gpu_bytes": on_gpu, "seconds": seconds},
        }
        return seconds


# -- the disk --------------------------------------------------------------------------------------


def forget_cached(paths: Sequence[Path]) -> None:
    """Drops files from the page cache, so that they are read from the disk the next time."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_rates(folder: Path, sizes: Sequence[int]) -> Json:
    """Bytes a second of plain files of these sizes, by 1 and 8 threads: write_1, read_1, ...

    Written with fsync through the page cache, read uncached. The folder is created.
    """
    folder.mkdir(parents=True)
    paths = [folder / str(number) for number in range(len(sizes))]
    found: Json = {}
    for threads in (1, 8):
        with ThreadPoolExecutor(threads) as pool:
            begin = time.perf_counter()
            list(pool.map(_write, paths, sizes))
            found[f"write_{threads}"] = sum(sizes) / (time.perf_counter() - begin)
            forget_cached(paths)
            begin = time.perf_counter()
            list(pool.map(_read, paths))
            found[f"read_{threads}"] = sum(sizes) / (time.perf_counter() - begin)
    return found


def _write(path: Path, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, len(_BLOCK)):
            file.write(_BLOCK[: min(len(_BLOCK), size - at)])
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    buffer = bytearray(len(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
