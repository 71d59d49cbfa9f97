"""What /sys and /proc say about this host; another root stands for another machine."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from hytrain.kernels.host_limits import memory_limit_files


def parse_list(text: str) -> list[int]:
    """Numbers in a list as the kernel writes it, for example "0-3,8"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A node of memory and the cores beside it."""

    number: int
    cores: list[int]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class HostTree:
    """A host's files, under "/" except in tests."""

    root: Path = Path("/")

    def numa_nodes(self) -> list[NumaNode]:
        """NUMA nodes with cores; empty if the kernel does not tell."""
        nodes: list[NumaNode] = []
        for folder in sorted((self.root / "sys/devices/system/node").glob("node[0-9]*")):
            cores = parse_list(_read(folder / "cpulist") or "")
            total = 0
            for line in (_read(folder / "meminfo") or "").splitlines():
                if "MemTotal:" in line:
                    total = int(line.split()[-2]) * 1024
            if cores:
                nodes.append(NumaNode(int(folder.name.removeprefix("node")), cores, total))
        return nodes

    def pci_node(self, address: str) -> int | None:
        """The NUMA node beside a device; None if the kernel does not tell, as in most containers of
        virtual machines."""
        text = _read(self.root / "sys/bus/pci/devices" / address / "numa_node")
        try:
            number = int(text or "-1")
        except ValueError:
            return None
        return None if number < 0 else number

    def cgroup_limits(self) -> list[int]:
        """Memory limits of the process's control groups, in bytes; of either version."""
        texts = [(_read(file) or "max").strip() for file in memory_limit_files(self.root)]
        # Version 1 says "no limit" with a number near 2 ** 63.
        return [int(text) for text in texts if text.isdigit() and int(text) < 2**62]

    def memory(self) -> dict[str, int]:
        """The values of /proc/meminfo's lines, in bytes, by name."""
        lines = (_read(self.root / "proc/meminfo") or "").splitlines()
        parts = [line.split() for line in lines if len(line.split()) >= 2]
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in parts}

    def huge_pages(self) -> str | None:
        """The mode of transparent huge pages: "always", "madvise" or "never"; None: unknown."""
        text = _read(self.root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
        chosen = [word.strip("[]") for word in text.split() if word.startswith("[")]
        return chosen[0] if chosen else None

    def cores(self) -> int:
        """Number of the machine's cores."""
        text = _read(self.root / "sys/devices/system/cpu/online")
        return len(parse_list(text)) if text else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What the kernel lets this process have; None: no limit.

    Attributes:
        usable_cores: numbers of the cores that it may run on.
        address_space, locked_memory: bytes.
        omp_threads: OMP_NUM_THREADS.
    """

    usable_cores: frozenset[int]
    address_space: int | None
    locked_memory: int | None
    omp_threads: str | None

    @staticmethod
    def of_this_process() -> ProcessLimits:
        """The present limits of this process."""
        return ProcessLimits(
            frozenset(os.sched_getaffinity(0)),
            _limit(resource.RLIMIT_AS),
            _limit(resource.RLIMIT_MEMLOCK),
            os.environ.get("OMP_NUM_THREADS"),
        )


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
