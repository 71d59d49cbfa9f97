"""What machine this is: for results that are named by hardware, and for bounds on memory."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import psutil

from hytrain import _C

_CPU_DIR = Path("/sys/devices/system/cpu")
_SIZE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_FALLBACK_LLC_BYTES = 32 * 2**20
_OWN_CGROUPS = Path("/proc/self/cgroup")


class _Hierarchy(NamedTuple):
    """A version of control groups: where it is mounted, and its files in each group's folder."""

    root: Path
    controller: str
    limit: str
    usage: str


_HIERARCHIES = (
    _Hierarchy(Path("/sys/fs/cgroup"), "", "memory.max", "memory.current"),
    _Hierarchy(
        Path("/sys/fs/cgroup/memory"), "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
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
    return min(host_memory_pools().values())


def host_memory_pools() -> dict[str, int]:
    """Bytes left in everything that this process's host memory comes out of.

    Returns:
        "machine", and each memory control group with a limit, the process's own and those around
        it, under a name that no other group of this machine has.
    """
    pools = {"machine": int(psutil.virtual_memory().available)}
    for hierarchy in _HIERARCHIES:
        for folder in _cgroup_folders(hierarchy):
            try:
                limit = (folder / hierarchy.limit).read_text().strip()
                usage = int((folder / hierarchy.usage).read_text())
                statistics = (folder / "memory.stat").read_text()
                where = folder.stat()
            except OSError:
                continue
            if limit != "max":
                usage -= _reclaimable_bytes(statistics)
                # The folder's own number: what a container sees as the root is a group like others.
                pools[f"cgroup {where.st_dev}:{where.st_ino}"] = max(0, int(limit) - usage)
    return pools


def _cgroup_folders(hierarchy: _Hierarchy) -> list[Path]:
    """This process's group and those around it, the root included; the root alone if unknown."""
    try:
        lines = [line.split(":", 2) for line in _OWN_CGROUPS.read_text().splitlines()]
    except OSError:
        lines = []
    for line in lines:
        if len(line) == 3 and hierarchy.controller in line[1].split(","):
            own = Path(line[2].strip("/"))
            inside = own if (hierarchy.root / own).is_dir() and ".." not in own.parts else Path()
            return [hierarchy.root / folder for folder in dict.fromkeys((inside, *inside.parents))]
    return [hierarchy.root]


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
