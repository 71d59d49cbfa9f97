"""Sends tensors from rank to rank, and makes all ranks learn of a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from hytrain.comm.collectives import ShardCollectives
from hytrain.errors import CheckpointError

_Found = TypeVar("_Found")

BLOCK_ELEMENTS = 16 * 1024 * 1024
"""Elements that one message carries at most: this bounds what a transfer stages on a GPU."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """``numel`` elements from one rank to another.

    Attributes:
        source: rank of the group that has them.
        destination: rank of the group that wants them.
        outgoing: 1-D, on any device; None on ranks other than the source.
        incoming: 1-D, on the host; None on ranks other than the destination.
    """

    source: int
    destination: int
    numel: int
    outgoing: torch.Tensor | None
    incoming: torch.Tensor | None


def exchange(
    transfers: Sequence[Transfer], collectives: ShardCollectives, device: torch.device
) -> None:
    """Carries out transfers; a collective, though a rank without a part in them returns at once.

    ``transfers``: the same list on all ranks, but for the tensors. ``device``: where NCCL finds its
    tensors; gloo's are on the host.
    """
    rank = collectives.rank
    remote: list[Transfer] = []
    for transfer in transfers:
        if transfer.source == transfer.destination:
            if transfer.incoming is not None and transfer.outgoing is not None:
                transfer.incoming.copy_(transfer.outgoing)
        elif transfer.numel and rank in (transfer.source, transfer.destination):
            remote.append(transfer)
    if not remote:
        return
    wire = device if dist.get_backend(collectives.group) == "nccl" else torch.device("cpu")
    for start in range(0, max(transfer.numel for transfer in remote), BLOCK_ELEMENTS):
        _exchange_blocks(
            [t for t in remote if start < t.numel], start, start + BLOCK_ELEMENTS, collectives, wire
        )


def _exchange_blocks(
    transfers: Sequence[Transfer],
    begin: int,
    end: int,
    collectives: ShardCollectives,
    wire: torch.device,
) -> None:
    operations: list[dist.P2POp] = []
    arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
    for transfer in transfers:
        if transfer.outgoing is not None:
            block = transfer.outgoing[begin:end].to(wire)
            peer = collectives.global_rank(transfer.destination)
            operations.append(dist.P2POp(dist.isend, block, peer, collectives.group))
        elif transfer.incoming is not None:
            target = transfer.incoming[begin:end]
            block = target if target.device == wire else torch.empty_like(target, device=wire)
            peer = collectives.global_rank(transfer.source)
            operations.append(dist.P2POp(dist.irecv, block, peer, collectives.group))
            arrivals.append((target, block))
    collectives.guarded(partial(_carry_out, operations))
    for target, block in arrivals:
        if block is not target:
            target.copy_(block)


def _carry_out(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def raise_together(
    failure: str | None,
    collectives: ShardCollectives,
    kind: type[CheckpointError] = CheckpointError,
) -> None:
    """Raises on every rank what went wrong on any; a collective, and so a barrier.

    ``kind``: the error's class; the same on all ranks.

    Raises:
        CheckpointError: of that kind; it names the ranks unless all say the same.
    """
    if collectives.world_size == 1:
        if failure is not None:
            raise kind(failure)
        return
    what = "the ranks' agreement on success"
    if not collectives.maximum([int(failure is not None)], what)[0]:
        return  # one number per rank, instead of every rank's text on every rank
    failures: list[str | None] = collectives.gather_objects(failure, what)
    if any(text is not None for text in failures):
        _raise_all(failures, kind)


def _raise_all(failures: Sequence[str | None], kind: type[CheckpointError]) -> NoReturn:
    if len(set(failures)) == 1:
        raise kind(str(failures[0]))
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(failures):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    lines = [
        f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in ranks_of.items()
    ]
    raise kind("\n".join(lines))


def from_first(find: Callable[[], _Found], collectives: ShardCollectives) -> _Found:
    """Returns on every rank what rank 0 finds, so that all go the same way.

    ``find``: called on rank 0 only; its result is pickled.

    Raises:
        CheckpointError: ``find`` failed; of the class that it raised, if a CheckpointError.
    """
    answer: tuple[_Found | None, CheckpointError | None] = None, None
    if collectives.rank == 0:
        try:
            answer = find(), None
        except Exception as error:
            # The others wait for an answer, whatever it was.
            kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
            answer = None, kind(str(error))
    found, failure = collectives.object_from_first(answer, "what rank 0 has found")
    if failure is not None:
        raise failure
    return cast("_Found", found)
