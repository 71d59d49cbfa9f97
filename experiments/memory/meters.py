"""What a phase takes of host and GPU, and what the disk can do."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from experiments.common.memory import host_memory
from experiments.common.records import Json
from hytrain.checkpoint.sync import sync_files

_SAMPLE_SECONDS = 0.005
_BLOCK_BYTES = 1 << 20


class PinnedBytes:
    """Bytes that are registered with the driver, counted where that is asked for."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self.peak = 0
        if torch.cuda.is_available():
            self._real: Any = torch.cuda.cudart()
            torch.cuda.cudart = lambda: self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:
        """As the driver's."""
        result = self._real.cudaHostRegister(address, num_bytes, flags)
        if int(result) == 0:
            self._sizes[address] = num_bytes
            self.peak = max(self.peak, self.now)
        return result

    def cudaHostUnregister(self, address: int) -> Any:
        """As the driver's."""
        self._sizes.pop(address, None)
        return self._real.cudaHostUnregister(address)

    @property
    def now(self) -> int:
        """Registered at the moment."""
        return sum(self._sizes.values())


class _RssPeak:
    """The peak of resident memory: the kernel's, or where it cannot be reset a sampled one."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._is_reset = host_memory().rss_peak_bytes <= host_memory().rss_bytes + (64 << 20)
        except OSError:
            self._is_reset = False
        self._peak = host_memory().rss_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if not self._is_reset:
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, host_memory().rss_bytes)

    def end(self) -> tuple[int, str]:
        """Bytes, and whose number it is."""
        if self._is_reset:
            return host_memory().rss_peak_bytes, "kernel"
        self._stop.set()
        self._thread.join()
        return max(self._peak, host_memory().rss_bytes), "sampled"


class PhaseMeter:
    """Peaks of phases beside what there was when it was made."""

    def __init__(self, device: str, pinned: PinnedBytes) -> None:
        self._gpu = device == "cuda"
        self._pinned = pinned
        self._before = host_memory().rss_bytes
        self.peaks: Json = {}

    def measure(self, name: str, action: Callable[[], object]) -> float:
        """Runs a phase; its seconds."""
        self._pinned.peak = self._pinned.now
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        rss = _RssPeak()
        begin = time.perf_counter()
        action()
        if self._gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak, source = rss.end()
        self.peaks[name] = {
            "rss_bytes": peak - self._before,
            "rss_source": source,
            "pinned_bytes": self._pinned.peak,
            "gpu_bytes": torch.cuda.max_memory_allocated() if self._gpu else None,
            "seconds": seconds,
        }
        return seconds


# -- the disk --------------------------------------------------------------------------------------


def forget_cached(paths: Sequence[Path]) -> None:
    """Has the system read files from the disk the next time."""
    for path in paths:
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def disk_rates(folder: Path, sizes: Sequence[int], most_bytes: int) -> Json:
    """Bytes a second of plain files of these sizes: written with fsync, read uncached.

    Written in whichever way is faster: through the page cache, or directly.

    Args:
        folder: made, and removed with all that is in it.
        sizes: of the files; some of them where together they are more than ``most_bytes``.
        most_bytes: written at a time.
    """
    chosen = _some(sizes, most_bytes)
    found: Json = {"files": len(chosen), "bytes": sum(chosen)}
    for threads in (1, 8):
        for write in (_write_directly, _write):
            with _files(folder, len(chosen)) as paths, ThreadPoolExecutor(threads) as pool:
                begin = time.perf_counter()
                list(pool.map(write, paths, chosen))
                sync_files(folder, paths)
                rate = sum(chosen) / (time.perf_counter() - begin)
                found[f"write_{threads}"] = max(rate, found.get(f"write_{threads}", 0.0))
        with _files(folder, len(chosen)) as paths, ThreadPoolExecutor(threads) as pool:
            list(pool.map(_write, paths, chosen))
            sync_files(folder, paths)
            forget_cached(paths)
            begin = time.perf_counter()
            list(pool.map(_read, paths))
            found[f"read_{threads}"] = sum(chosen) / (time.perf_counter() - begin)
    return found


def _some(sizes: Sequence[int], most_bytes: int) -> list[int]:
    every = max(1, -(-sum(sizes) // most_bytes))
    return sorted(sizes, reverse=True)[every // 2 :: every] or list(sizes[:1])


@contextmanager
def _files(folder: Path, count: int) -> Generator[list[Path]]:
    folder.mkdir(parents=True)
    paths = [folder / str(number) for number in range(count)]
    try:
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
        folder.rmdir()


_CONTENT = os.urandom(_BLOCK_BYTES)


def _write(path: Path, size: int) -> None:
    with path.open("wb", buffering=0) as file:
        for at in range(0, size, _BLOCK_BYTES):
            file.write(_CONTENT[: min(_BLOCK_BYTES, size - at)])


_PAGES = mmap.mmap(-1, 2 * _BLOCK_BYTES)  # direct writes are of aligned memory
_PAGES.write(2 * _CONTENT)


def _write_directly(path: Path, size: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o666)
    except OSError:  # the file system has no direct writes
        _write(path, size)
        return
    whole = size - size % mmap.PAGESIZE
    with open(descriptor, "wb", buffering=0) as file, memoryview(_PAGES) as pages:
        for at in range(0, whole, len(pages)):
            file.write(pages[: min(len(pages), whole - at)])
    with path.open("ab", buffering=0) as file:
        file.write(_CONTENT[: size - whole])


def _read(path: Path) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
