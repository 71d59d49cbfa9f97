"""The memory that the host has left: on the machine, and in each limit around this process."""

from __future__ import annotations

import functools
import os
import platform
import resource
from pathlib import Path
from typing import NamedTuple

import psutil

from hytrain.errors import size_text

GROUP = "cgroup"
"""Prefix of the names of control groups, see :func:`host_memory_pools`."""

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


_PROCESS_LIMITS = {
    "address space (ulimit -v)": (resource.RLIMIT_AS, "vms"),
    "data (ulimit -d)": (resource.RLIMIT_DATA, "data"),
}
"""Limits of a process by name, and the field of ``psutil``'s memory that counts for each."""


def available_host_bytes() -> int:
    """Host memory that this process can still take: the machine's or the cgroup's, the smaller."""
    return min(host_memory_pools().values())


def host_memory_pools() -> dict[str, int]:
    """Bytes left in everything that this process's host memory comes out of.

    Returns:
        By name: "machine"; each memory control group with a limit, the process's own and those
        around it, under a name that no other group of this machine has; the process's own limits
        (ulimit), under names that no other process has.
    """
    left = int(psutil.virtual_memory().available) - free_beside_no_cores()
    pools = {"machine": max(0, left), **_process_pools()}
    for hierarchy in _HIERARCHIES:
        for folder in _cgroup_folders(hierarchy):
            try:
                limit = (folder / hierarchy.limit).read_text().strip()
                if limit == "max":
                    continue
                usage = int((folder / hierarchy.usage).read_text())
                statistics = (folder / "memory.stat").read_text()
                where = folder.stat()
            except OSError:
                continue
            usage -= _reclaimable_bytes(statistics)
            # The folder's own number: what a container sees as the root is a group like others.
            pools[f"{GROUP} {where.st_dev}:{where.st_ino}"] = max(0, int(limit) - usage)
    return pools


def free_beside_no_cores(root: Path = Path("/")) -> int:
    """Free bytes of NUMA nodes without cores, which the kernel counts like any others.

    If CPU and GPU share addresses (GH200, GB200), the GPU's memory is such a node: state that
    overflowed there would be taken from the GPU. A CXL extension is one as well, and is left out.

    ``root``: "/"; another one stands for another machine.
    """
    lines = "\n".join(map(_text, _memory_without_cores(root))).splitlines()
    return sum(int(line.split()[-2]) * 1024 for line in lines if "MemFree:" in line)


def has_coherent_gpu(root: Path = Path("/")) -> bool:
    """Whether a Grace CPU and its GPU share addresses, and so use NVLink-C2C instead of PCIe."""
    return platform.machine() == "aarch64" and bool(_memory_without_cores(root))


@functools.cache
def _memory_without_cores(root: Path) -> tuple[Path, ...]:
    """The "meminfo" of each NUMA node without cores."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    return tuple(node.with_name("meminfo") for node in nodes if _text(node).isspace())


def _text(file: Path) -> str:
    """A file's text; empty if the kernel does not give it. A list of no cores is an empty line."""
    try:
        return file.read_text()
    except OSError:
        return ""


_CPU_ROOTS = ((Path("/sys/fs/cgroup"), ""), (Path("/sys/fs/cgroup/cpu"), "cpu"))
"""Where each version of control groups limits CPU time, and the controller's name."""


def cpu_quotas() -> dict[str, float]:
    """CPU time that control groups allow this process, in cores, by the group's name.

    Empty if none is limited. A container that may use 4 cores of 64 (``docker --cpus 4``) sees all
    64 of them, and is stopped for most of each period if its threads run on all.
    """
    quotas: dict[str, float] = {}
    for root, controller in _CPU_ROOTS:
        for folder in _cgroup_folders(_Hierarchy(root, controller, "", "")):
            try:
                quota = _quota(folder)
                where = folder.stat()
            except (OSError, ValueError):
                continue
            if quota is not None:
                quotas[f"{GROUP} {where.st_dev}:{where.st_ino}"] = quota
    return quotas


def _quota(folder: Path) -> float | None:
    file = folder / "cpu.max"
    if file.exists():
        limit, period = file.read_text().split()
    else:
        limit = (folder / "cpu.cfs_quota_us").read_text().strip()
        period = (folder / "cpu.cfs_period_us").read_text()
    return None if limit in ("max", "-1") else int(limit) / int(period)


def _process_pools() -> dict[str, int]:
    """Bytes that the limits of this process alone leave; empty if it has none."""
    limited = [
        (name, resource.getrlimit(which)[0], used)
        for name, (which, used) in _PROCESS_LIMITS.items()
    ]
    limited = [entry for entry in limited if entry[1] != resource.RLIM_INFINITY]
    if not limited:
        return {}  # asking what the process has takes a while
    memory = psutil.Process().memory_info()
    return {
        f"{name} of process {os.getpid()}": max(0, limit - int(getattr(memory, used)))
        for name, limit, used in limited
    }


def memory_limit_files(root: Path) -> list[Path]:
    """Files of the memory limits around this process, of either version; some may be missing.

    ``root``: "/"; another one stands for another machine.
    """
    return [
        folder / hierarchy.limit
        for hierarchy in _HIERARCHIES
        for folder in _cgroup_folders(hierarchy, root)
    ]


def _cgroup_folders(hierarchy: _Hierarchy, root: Path = Path("/")) -> list[Path]:
    """This process's group and those around it, the root included; the root alone if unknown."""
    top = root / hierarchy.root.relative_to("/")
    try:
        text = (root / _OWN_CGROUPS.relative_to("/")).read_text()
        lines = [line.split(":", 2) for line in text.splitlines()]
    except OSError:
        lines = []
    for line in lines:
        if len(line) == 3 and hierarchy.controller in line[1].split(","):
            own = Path(line[2].strip("/"))
            inside = own if (top / own).is_dir() and ".." not in own.parts else Path()
            return [top / folder for folder in dict.fromkeys((inside, *inside.parents))]
    return [top]


def _reclaimable_bytes(memory_stat: str) -> int:
    """Cached files that a cgroup's usage counts and its kernel drops when memory is wanted."""
    entries = dict(line.split(maxsplit=1) for line in memory_stat.splitlines() if " " in line)
    return int(entries.get("total_inactive_file", entries.get("inactive_file", "0")))


def describe_free_memory() -> str:
    """Free memory in words: the machine, the tightest control group, the process's limits."""
    pools = host_memory_pools()
    machine = pools["machine"]
    parts = [f"the machine has {size_text(machine)} left"]
    groups = [left for name, left in pools.items() if name.startswith(GROUP)]
    group = min(groups, default=machine)
    if group < machine:
        parts.append(f"this process's memory control group {size_text(group)}")
    own = _process_pools()
    parts += [
        f"its {name.partition(' of process')[0]} {size_text(left)}" for name, left in own.items()
    ]
    return ", ".join(parts)
