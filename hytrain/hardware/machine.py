"""What machine this is, for results that name their hardware."""

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

    If the kernel does not tell: 32 MiB.
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
