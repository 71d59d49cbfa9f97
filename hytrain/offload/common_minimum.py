"""The smallest of the ranks' numbers, found on the device beside what is queued there."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hytrain.comm.collectives import ShardCollectives
from hytrain.offload.streams import Streams


class CommonMinimum:
    """What every rank has at least, of something that each counts for itself."""

    def __init__(self, streams: Streams, collectives: ShardCollectives) -> None:
        self._collectives = collectives
        self._number = torch.zeros(1, dtype=torch.int32, device=streams.device)
        self._host = torch.zeros(1, dtype=torch.int32, pin_memory=streams.is_cuda)
        self.count = 0
        """What was read last."""

    def launch(self, count: int) -> None:
        """A collective that does not wait, in the current stream.

        ``count``: this rank's. The last one must have been read.
        """
        self._number.fill_(count)
        self._collectives.all_reduce(self._number, dist.ReduceOp.MIN)
        self._host.copy_(self._number, non_blocking=True)

    def read(self) -> None:
        """Takes over what was launched; the host has waited for something queued behind it."""
        self.count = int(self._host)
