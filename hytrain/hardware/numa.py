"""Chooses a NUMA node for each rank, and runs work on its cores, so that memory lies there, too.

Linux backs a page on the node of the core that touches it first, so binding threads binds memory as
well. ``mbind`` would do it outright, but containers forbid it by default (Docker's seccomp profile
asks for CAP_SYS_NICE), and torch's pinned memory is placed by the driver when it is allocated;
memory that is mapped first and then registered (``offload/arena.py``) is on the touching thread's.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from hytrain.hardware.host_tree import HostTree

logger = logging.getLogger(__name__)

T = TypeVar("T")

Cores = frozenset[int]

_NEAR_TOLERANCE = 1.03
"""How many times as long updates may take on one node as on all cores: copies are shorter there."""


def pci_address(device: torch.device) -> str | None:
    """A GPU's PCI address, as in "0000:3b:00.0"; None without a GPU, or if torch does not tell."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    numbers = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:
        return None
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


@dataclass(frozen=True, slots=True)
class NodeCores:
    """A process's cores by NUMA node.

    Attributes:
        nodes: the node's number -> the process's cores there; nodes without any are left out.
        gpu_node: the node of its GPU; None if that is not known.
    """

    nodes: Mapping[int, Cores] = field(default_factory=dict[int, Cores])
    gpu_node: int | None = None

    @property
    def can_choose(self) -> bool:
        """Whether there is more than one node to run on."""
        return len(self.nodes) > 1


def node_cores(address: str | None, usable: Cores, tree: HostTree | None = None) -> NodeCores:
    """Returns a process's usable cores by node; ``address`` is its GPU's (:func:`pci_address`)."""
    tree = tree or HostTree()
    found = {node.number: usable & frozenset(node.cores) for node in tree.numa_nodes()}
    gpu_node = None if address is None else tree.pci_node(address)
    return NodeCores({number: cores for number, cores in found.items() if cores}, gpu_node)


def assign_nodes(ranks: Sequence[NodeCores]) -> list[int] | None:
    """Chooses a node for each rank of a machine: its GPU's, as long as that has room.

    A node has room for ranks in proportion to its cores. Otherwise ranks whose GPUs are on one node
    would share its memory's bandwidth, and that of other nodes would lie idle. Ranks for which
    there is no room go to other nodes, from where copies cross the link between nodes.

    Returns:
        The ranks' nodes; None if some rank's nodes are not known.
    """
    if not all(rank.nodes for rank in ranks):
        return None
    cores: dict[int, Cores] = {}
    for rank in ranks:
        for number, own in rank.nodes.items():
            cores[number] = cores.get(number, frozenset()) | own
    total = sum(map(len, cores.values()))
    room = {n: math.ceil(len(ranks) * len(own) / total) for n, own in cores.items()}
    nodes: dict[int, int] = {}

    def put(index: int, number: int) -> None:
        nodes[index] = number
        room[number] -= 1

    for index, rank in enumerate(ranks):
        if not rank.can_choose:
            put(index, next(iter(rank.nodes)))
    for index, rank in enumerate(ranks):
        number = rank.gpu_node
        if index in nodes or number is None or number not in rank.nodes:
            continue
        if room[number] > 0:
            put(index, number)
    for index, rank in enumerate(ranks):
        if index not in nodes:
            put(index, max(rank.nodes, key=lambda n: (room[n] / len(cores[n]), n == rank.gpu_node)))
    return [nodes[index] for index in range(len(ranks))]


@contextmanager
def on_cores(cores: Cores | None) -> Generator[None]:
    """Runs the calling thread on ``cores`` in the block; threads started meanwhile stay there.

    ``cores``: None: nothing is done. If the system refuses, a warning says so.
    """
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning(
            "threads cannot be bound to cores %s (%s): updates run on any", sorted(cores), error
        )
        yield
        return
    try:
        yield
    finally:
        # Somebody may have taken cores from the process meanwhile.
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def call_on(cores: Cores | None, function: Callable[[], T]) -> T:
    """Calls a function in a thread that is bound to cores.

    In a new thread, since OpenMP keeps a team for each thread that has started one: the calling
    thread's team may run anywhere.

    ``cores``: None: calls it in the calling thread; ``function``: what it raises is raised.
    """
    if cores is None:
        return function()

    def run() -> T:
        with on_cores(cores):
            return function()

    with ThreadPoolExecutor(1, "hytrain-bound") as thread:
        return thread.submit(run).result()


def prefers_near(near: Sequence[float], anywhere: Sequence[float]) -> bool:
    """Whether the ranks of a machine are to update on a node each: all of them or none.

    ``near``: each rank's time for an update with threads and memory on its node, in seconds;
    ``anywhere``: the same with its share of all cores, and memory wherever they are.
    """
    return max(near) <= _NEAR_TOLERANCE * max(anywhere)


_NODE_PAGES = re.compile(r"\bN(\d+)=(\d+)")


def nodes_of_memory(address: int, maps: Path = Path("/proc/self/numa_maps")) -> dict[int, int]:
    """Number of pages, by node, of the mapping that begins at an address; empty if the kernel does
    not tell."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return {}
    pages: Counter[int] = Counter()
    for line in lines:
        begin, _, rest = line.partition(" ")
        if begin == f"{address:x}" or begin == f"{address:08x}":
            for node, count in _NODE_PAGES.findall(rest):
                pages[int(node)] += int(count)
    return dict(pages)
