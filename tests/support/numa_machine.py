"""A simulated host with NUMA nodes: its files, and how long updates take on it.

The model consists of bandwidths: of a core, which is lower for another node's memory, of a node's
memory and of the link between two nodes. The last two are shared by all ranks: ranks that share a
resource get equal parts of it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from hytrain.hardware.host_share import RankHost
from hytrain.hardware.host_tree import HostTree
from hytrain.hardware.numa import node_cores

BYTES_A_PARAMETER = 30
COPIED_A_PARAMETER = 4
"""Those of them that cross PCIe: the gradient from the GPU, and the new weight to it."""


@dataclass(frozen=True)
class Machine:
    """A machine's bandwidths in GB/s.

    Attributes:
        nodes: cores of each node.
        core: of a core, from its own node's memory.
        memory: of a node's memory.
        link: between two nodes, each way.
        far: the share of ``core`` that is left from another node's memory.
        pcie: between a GPU and its node.
    """

    nodes: Sequence[Sequence[int]]
    core: float = 12.0
    memory: float = 150.0
    link: float = 60.0
    far: float = 0.6
    pcie: float = 50.0

    def write_files(self, root: Path, gpus: Mapping[str, int]) -> HostTree:
        """Writes the files in which the kernel describes the machine.

        Args:
            root: an empty folder.
            gpus: PCI address of each GPU -> its node.
        """
        files = {"sys/devices/system/cpu/online": f"0-{sum(map(len, self.nodes)) - 1}\n"}
        for number, cores in enumerate(self.nodes):
            folder = f"sys/devices/system/node/node{number}"
            files[f"{folder}/cpulist"] = ",".join(map(str, cores)) + "\n"
            files[f"{folder}/meminfo"] = f"Node {number} MemTotal: {2**28} kB\n"
        for address, node in gpus.items():
            files[f"sys/bus/pci/devices/{address}/numa_node"] = f"{node}\n"
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return HostTree(root)

    def node_of(self, core: int) -> int:
        return next(n for n, cores in enumerate(self.nodes) if core in cores)


@dataclass(frozen=True)
class Setting:
    """How a rank updates: threads on some cores; memory lies where the threads are."""

    cores: frozenset[int]
    threads: int
    gpu_node: int


def seconds(machine: Machine, settings: Sequence[Setting]) -> list[float]:
    """Returns how long a billion parameters take each rank, all ranks at the same time."""
    users = Counter(core for setting in settings for core in setting.cores)
    rates: list[float] = []
    loads: list[dict[Any, float]] = []
    for setting in settings:
        share = _by_node(machine, setting.cores)
        own = sum(1 / users[core] for core in setting.cores)
        working = min(setting.threads, own)
        # The launching thread needs a core. If it has none, the team waits for the thread with
        # which it shares one: on 16 cores 16 threads took 1.2 times as long as 15, in a training.
        crowded = own > 2 and setting.threads > own - 1
        local = sum(part**2 for part in share.values())
        each = machine.core / (local + (1 - local) / machine.far)
        rates.append(working * each * (min(0.85, 0.95 * (1 - 1 / own)) if crowded else 1.0))
        load: dict[Any, float] = {("memory", node): part for node, part in share.items()}
        for here, there in product(share, share):
            if here != there:
                load["link", there, here] = share[here] * share[there]
        copied = COPIED_A_PARAMETER / BYTES_A_PARAMETER
        load["pcie", len(loads)] = copied
        for node, part in share.items():
            if node != setting.gpu_node:
                for way in ((node, setting.gpu_node), (setting.gpu_node, node)):
                    key = ("link", *way)
                    load[key] = load.get(key, 0.0) + part * copied / 2
        loads.append(load)
    limits = {"memory": machine.memory, "link": machine.link, "pcie": machine.pcie}
    return [BYTES_A_PARAMETER / rate for rate in _fair(rates, loads, limits)]


def _fair(
    wanted: Sequence[float], loads: Sequence[Mapping[Any, float]], limits: Mapping[str, float]
) -> list[float]:
    """Max-min fair rates: all grow together, until each has what it wants or meets a limit."""
    rates = [0.0] * len(wanted)
    growing = set(range(len(wanted)))
    resources = {key for load in loads for key in load}
    while growing:
        room: dict[Any, float] = {}
        for key in resources:
            users = sum(loads[rank].get(key, 0.0) for rank in growing)
            used = sum(rate * load.get(key, 0.0) for rate, load in zip(rates, loads, strict=True))
            if users:
                room[key] = (limits[key[0]] - used) / users
        step = min(*room.values(), *(wanted[rank] - rates[rank] for rank in growing))
        for rank in growing:
            rates[rank] += step
        full = {key for key, left in room.items() if left <= step * (1 + 1e-9)}
        growing = {
            rank
            for rank in growing
            if wanted[rank] - rates[rank] > 1e-9 and not full & loads[rank].keys()
        }
    return rates


@cache
def _by_node(machine: Machine, cores: frozenset[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for core in cores:
        node = machine.node_of(core)
        found[node] = found.get(node, 0.0) + 1 / len(cores)
    return found


_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 31, 32, 40, 48, 56)


def best_by_hand(machine: Machine, usable: frozenset[int], gpu_nodes: Sequence[int]) -> float:
    """Returns the slowest rank's seconds at the best of the settings that one would try by hand.

    These are all cores for all ranks, equal parts of the cores, and every assignment of ranks to
    nodes, on all cores of the node; each with many numbers of threads.
    """
    ranks = len(gpu_nodes)
    by_node = [usable & frozenset(cores) for cores in machine.nodes]
    open_nodes = [number for number, cores in enumerate(by_node) if cores]
    layouts: list[list[frozenset[int]]] = [[usable] * ranks]
    ordered = sorted(usable)
    if ranks <= len(ordered):
        size = len(ordered) // ranks
        layouts.append([frozenset(ordered[r * size : (r + 1) * size]) for r in range(ranks)])
    seen: set[tuple[int, ...]] = set()
    for nodes in product(open_nodes, repeat=ranks):
        # Ranks whose GPUs are on one node are alike.
        alike = tuple(sorted(zip(gpu_nodes, nodes, strict=True)))
        if alike in seen:
            continue
        seen.add(alike)
        layouts.append([by_node[node] for node in nodes])
    best = float("inf")
    for layout in layouts:
        most = max(map(len, layout))
        for threads in sorted({n for n in _COUNTS if n <= most} | {most - 1, most} - {0}):
            settings = [
                Setting(cores, min(threads, len(cores)), node)
                for cores, node in zip(layout, gpu_nodes, strict=True)
            ]
            best = min(best, max(seconds(machine, settings)))
    return best


class Ranks:
    """Threads that stand for ranks, with collectives among them."""

    def __init__(self, number: int) -> None:
        self._barrier = threading.Barrier(number)
        self._posted: list[Any] = [None] * number

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Returns all ranks' values."""
        self._posted[rank] = value
        self._barrier.wait(100)
        found = list(self._posted)
        self._barrier.wait(100)
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Calls ``function`` for each rank, all at the same time; returns the results."""
        results: list[Any] = [None] * len(self._posted)

        def call(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


def hosts_of(
    tree: HostTree, addresses: Sequence[str | None], cores: Sequence[frozenset[int]]
) -> list[RankHost]:
    """Returns where each rank runs: all on one machine."""
    return [
        RankHost("here", own, frozenset({"machine"}), {}, node_cores(address, own, tree))
        for address, own in zip(addresses, cores, strict=True)
    ]
