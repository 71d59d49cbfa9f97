"""Reduce-scatter and all-gather of one layer, equal shards or not.

Equal shards use the even collective, which is faster. NCCL takes lists of unequal sizes for both;
gloo takes them for reduce-scatter, and for the gather every rank broadcasts its shard, which
needs no padding copies either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

# Renamed in torch 2.13; the old names warn there and the new ones are missing before.
_names = vars(dist)
_reduce_scatter_even: Callable[..., object] = (
    _names.get("reduce_scatter_single") or _names["reduce_scatter_tensor"]
)
_all_gather_even: Callable[..., object] = (
    _names.get("all_gather_single") or _names["all_gather_into_tensor"]
)


class ShardCollectives:
    """Collectives among the ranks that share the optimizer state."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """
        Args:
            group: the data-parallel process group; None for the default one.
        """
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._is_nccl = dist.get_backend(group) == "nccl"

    def global_rank(self, rank: int) -> int:
        """The global rank of a rank of the group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def reduce_scatter(self, flat: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Sums ``flat`` over the ranks and returns this rank's shard.

        Args:
            flat: 1-D, sum(sizes) elements, on every rank; not changed.
            sizes: elements of each rank's shard.
        """
        if self.world_size == 1:
            return flat
        shard = torch.empty(sizes[self.rank], dtype=flat.dtype, device=flat.device)
        if len(set(sizes)) == 1:
            _reduce_scatter_even(shard, flat, group=self.group)
        else:
            dist.reduce_scatter(shard, list(flat.split(list(sizes))), group=self.group)
        return shard

    def all_gather(self, flat: torch.Tensor, sizes: Sequence[int]) -> None:
        """Fills ``flat`` in place from every rank's own shard of it.

        Args:
            flat: 1-D, sum(sizes) elements; this rank's shard holds its contribution.
            sizes: elements of each rank's shard.
        """
        if self.world_size == 1:
            return
        shards = list(flat.split(list(sizes)))
        if len(set(sizes)) == 1:
            _all_gather_even(flat, shards[self.rank], group=self.group)
        elif self._is_nccl:
            dist.all_gather(shards, shards[self.rank], group=self.group)
        else:
            for rank, shard in enumerate(shards):
                if shard.numel():
                    dist.broadcast(shard, self.global_rank(rank), group=self.group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a tensor over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)

    def agree_on_order(
        self, order: Sequence[int], early: Sequence[bool], device: torch.device, *, has_seen: bool
    ) -> tuple[list[int], list[bool]]:
        """One order for all ranks, and early only where every rank says so.

        The order is that of the lowest rank that has seen a backward; a rank without one (it
        computes no samples) has no say.
        """
        if self.world_size == 1:
            return list(order), list(early)
        first = torch.tensor([self.rank if has_seen else self.world_size], device=device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self.group)
        source = min(int(first.item()), self.world_size - 1)
        early = early if has_seen else [True] * len(early)
        table = torch.tensor([list(order), [int(e) for e in early]], device=device)
        dist.broadcast(table[0], self.global_rank(source), group=self.group)
        dist.all_reduce(table[1], op=dist.ReduceOp.MIN, group=self.group)
        agreed = table.tolist()
        return [int(i) for i in agreed[0]], [bool(e) for e in agreed[1]]
