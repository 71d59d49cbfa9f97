"""What machine this is: for results that are named by hardware, and for bounds on memory."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path

import psutil

from hytrain import _C

_CPU_DIR = Path("/sys/devices/system/cpu")
_SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_FALLBACK_LLC_BYTES = 32 * 2**20
# (limit, usage, statistics) of cgroup version 2, then 1.
_CGROUP_FILES = (
    (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.current",
        "/sys/fs/cgroup/memory.stat",
    ),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def usable_cores() -> int:
    """Number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_model() -> str:
    """The CPU's name as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def last_level_cache_bytes() -> int:
    """Size of the last-level caches of all usable cores together, each cache counted once.

    Where the kernel does not tell, 32 MiB.
    """
    sizes: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        indices = sorted((_CPU_DIR / f"cpu{cpu}" / "cache").glob("index[0-9]*"))
        if not indices:
            continue
        try:
            shared_by = (indices[-1] / "shared_cpu_list").read_text().strip()
            text = (indices[-1] / "size").read_text().strip()
        except OSError:
            continue
        sizes[shared_by] = int(text[:-1]) * _SIZE_UNITS[text[-1]]
    return sum(sizes.values()) or _FALLBACK_LLC_BYTES


def available_host_bytes() -> int:
    """Host memory that this process can still take: the machine's or the cgroup's, the smaller."""
    available = psutil.virtual_memory().available
    for limit_file, usage_file, statistics_file in _CGROUP_FILES:
        try:
            limit = Path(limit_file).read_text().strip()
            usage = int(Path(usage_file).read_text())
            statistics = Path(statistics_file).read_text()
        except OSError:
            continue
        if limit != "max":
            usage -= _reclaimable_bytes(statistics)
            available = min(available, max(0, int(limit) - usage))
    return available


def _reclaimable_bytes(memory_stat: str) -> int:
    """Cached files that a cgroup's usage counts and its kernel drops when memory is wanted."""
    entries = dict(line.split(maxsplit=1) for line in memory_stat.splitlines() if " " in line)
    return int(entries.get("total_inactive_file", entries.get("inactive_file", "0")))


def package_version(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe() -> dict[str, object]:
    """The "machine" block of a result file: hardware, versions, date, and the command that ran."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "isa": _C.active_isa(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in ("hytrain", "torch", "deepspeed")},
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": shlex.join(["hytrain", *sys.argv[1:]]),
    }
