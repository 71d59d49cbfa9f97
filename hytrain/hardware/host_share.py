"""What part of its host a rank has: ranks that share a machine are found by asking, not assumed.

A launcher tells a process only how many it has started on its host: two launchers may run on
one machine, several containers may share one kernel, and LOCAL_RANK need not follow RANK
(DeepSpeed counts ``RANK % slots``: on the second of two hosts with 1 and 2 slots that is 1, 0).
So the ranks exchange what identifies the things that they share: the running kernel, the memory
control groups, the cores.
"""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.hardware.numa import NodeCores, assign_nodes, node_cores, pci_address
from hytrain.kernels.host_limits import cpu_quotas, host_memory_pools

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class RankHost:
    """Where a rank runs.

    Attributes:
        machine: identifies the running kernel; equal for two containers of one machine.
        cores: numbers of the cores that the rank may use.
        memory_pools: names of the memory that it draws from, unique on its machine.
        quotas: CPU time of each of its control groups, in cores, by the group's name.
        places: its cores by NUMA node.
    """

    machine: str
    cores: frozenset[int]
    memory_pools: frozenset[str]
    quotas: Mapping[str, float] = field(default_factory=dict[str, float])
    places: NodeCores = field(default_factory=NodeCores)


@dataclass(frozen=True, slots=True)
class NearCores:
    """A rank's part of the cores of its NUMA node.

    Attributes:
        cores: numbers of all cores that it may use there, including those shared with other ranks.
        number: how many of them are its share; at least 1.
    """

    cores: frozenset[int]
    number: int


@dataclass(frozen=True, slots=True)
class HostShare:
    """What a rank may take of its host.

    Attributes:
        ranks: ranks on the same machine, this one included.
        cores: number of its cores, each divided among the ranks that have it; whole, at least 1.
        pool_ranks: for each of its memory pools, the number of ranks that draw from it.
        near: its part of one node, its GPU's if possible; None if the machine has one node, or the
            ranks' nodes are not known.
        some_near: whether any rank of the job has more than one node to run on.
    """

    ranks: int
    cores: int
    pool_ranks: Mapping[str, int]
    near: NearCores | None = None
    some_near: bool = False

    def memory(self, available: Mapping[str, int]) -> int:
        """This rank's share of the bytes that each pool has left: the scarcest one decides."""
        return min(
            left // self.pool_ranks.get(name, self.ranks) for name, left in available.items()
        )


def machine_identity() -> str:
    """A name that is the same for all processes of one running kernel and for no others.

    The kernel draws it at boot. Clones of a virtual machine's snapshot may have the same one: ranks
    on them are then taken to share a machine, and each uses less of its host than it could.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def this_host(device: torch.device | None = None) -> RankHost:
    """Where this process runs; ``device``: the rank's GPU, if it matters which one that is."""
    usable = frozenset(os.sched_getaffinity(0))
    address = None if device is None else pci_address(device)
    return RankHost(
        machine_identity(),
        usable,
        frozenset(host_memory_pools()),
        cpu_quotas(),
        node_cores(address, usable),
    )


def divide_host(
    hosts: Sequence[RankHost], rank: int, *, started_here: int = 1, num_cores: int | None = None
) -> HostShare:
    """A rank's part of its host.

    Args:
        hosts: where each rank runs.
        rank: the rank whose part it is.
        started_here: processes that the launcher says it has started on this rank's host; if that
            is more than the ranks found there, the others share it without having been asked.
        num_cores: cores of the machine; default: those of this one.
    """
    mine = hosts[rank]
    here = [host for host in hosts if host.machine == mine.machine]
    unseen = max(0, started_here - len(here))
    # A launcher that binds ranks to cores leaves each its own: then the unseen ones have others.
    everywhere = num_cores or os.cpu_count() or len(mine.cores)
    strangers = unseen if len(mine.cores) * (len(here) + unseen) > everywhere else 0
    # The time of a group is divided among its ranks, whatever cores they run on.
    most = min(
        (
            quota / (unseen + sum(name in host.quotas for host in here))
            for name, quota in mine.quotas.items()
        ),
        default=math.inf,
    )
    near = _near(hosts, rank, most) if not unseen else None
    return HostShare(
        ranks=len(here) + unseen,
        cores=_part(mine.cores, [host.cores for host in here], strangers, most),
        pool_ranks={
            name: unseen + sum(name in host.memory_pools for host in here)
            for name in mine.memory_pools
        },
        near=near,
        some_near=any(host.places.can_choose for host in hosts),
    )


def _part(
    mine: frozenset[int], everyone: Sequence[frozenset[int]], strangers: int, most: float
) -> int:
    """A rank's share of its cores, each divided among those that have it; ``most`` at most."""
    users = Counter(core for cores in everyone for core in cores)
    part = sum(1.0 / (users[core] + strangers) for core in mine)
    return max(1, int(min(part, most) + 1e-6))  # thirds of three cores are one


def _near(hosts: Sequence[RankHost], rank: int, most: float) -> NearCores | None:
    """The rank's part of its node, if all ranks of its machine have one each."""
    here = [r for r, host in enumerate(hosts) if host.machine == hosts[rank].machine]
    places = [hosts[r].places for r in here]
    nodes = assign_nodes(places)
    if nodes is None or not any(place.can_choose for place in places):
        return None
    chosen = [place.nodes[node] for place, node in zip(places, nodes, strict=True)]
    mine = chosen[here.index(rank)]
    return NearCores(mine, _part(mine, chosen, 0, most))


def share_host(collectives: ShardCollectives, device: torch.device | None = None) -> HostShare:
    """This rank's part of its host; a collective."""
    hosts: list[RankHost] = collectives.gather_objects(this_host(device), "the ranks' hosts")
    return divide_host(hosts, collectives.rank, started_here=_started_here())


def _started_here() -> int:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # torchrun's, DeepSpeed's
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1
