"""How much the ranks' clocks differ: CLOCK_MONOTONIC is the same clock only within a machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hytrain.comm.collectives import ShardCollectives
from hytrain.hardware.host_share import machine_identity

_ROUNDS = 32
"""Round trips with each rank; the shortest one counts, which nothing has delayed."""


def clock_offset_ns(
    collectives: ShardCollectives,
    *,
    is_wanted: bool,
    now: Callable[[], int] = time.monotonic_ns,
    machine: str | None = None,
) -> float:
    """Returns what must be added to this rank's CLOCK_MONOTONIC to get rank 0's; a collective.

    The error is half of the shortest round trip at most (Cristian, Probabilistic clock
    synchronization, Distributed Computing 3, 1989).

    Args:
        is_wanted: whether this rank wants it; if no rank does, nothing is measured.
        now: this rank's clock, in ns.
        machine: what the ranks of one machine have in common; default: the kernel's name.
    """
    if collectives.world_size == 1:
        return 0.0
    mine = (machine or machine_identity(), is_wanted)
    ranks: list[tuple[str, bool]] = collectives.gather_objects(mine, "the ranks' clocks")
    if not any(wanted for _, wanted in ranks) or len({machine for machine, _ in ranks}) == 1:
        return 0.0
    offset = [0.0]

    def measure() -> None:
        for other in range(1, collectives.world_size):
            if collectives.rank == 0:
                _answer(collectives, other, now)
            elif collectives.rank == other:
                offset[0] = _ask(collectives, now)

    collectives.guarded(measure)
    return 0.0 if ranks[collectives.rank][0] == ranks[0][0] else offset[0]


def _message(collectives: ShardCollectives) -> torch.Tensor:
    device = "cuda" if collectives.is_nccl else "cpu"
    return torch.zeros(1, dtype=torch.int64, device=device)


def _answer(collectives: ShardCollectives, other: int, now: Callable[[], int]) -> None:
    message, peer = _message(collectives), collectives.global_rank(other)
    for _ in range(_ROUNDS):
        dist.recv(message, peer, collectives.group)
        message.item()  # waits until it is there: the answer is this clock's time after that
        dist.send(message.fill_(now()), peer, collectives.group)


def _ask(collectives: ShardCollectives, now: Callable[[], int]) -> float:
    message, peer = _message(collectives), collectives.global_rank(0)
    trips: list[tuple[int, float]] = []
    for _ in range(_ROUNDS):
        begin = now()
        dist.send(message, peer, collectives.group)
        dist.recv(message, peer, collectives.group)
        theirs = int(message.item())
        end = now()
        trips.append((end - begin, theirs - (begin + end) / 2))
    return min(trips)[1]
