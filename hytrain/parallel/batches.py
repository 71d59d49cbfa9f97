"""Unequal batches: which samples of the global batch each rank computes, and in which pieces.

Batch and shards are decided independently (the idea of Cephalo): a fast GPU with little memory
computes many samples and owns little state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from hytrain.config import BatchShares
from hytrain.errors import ConfigError


class UnequalBatchSampler(Sampler[list[int]]):
    """Deals a dataset to ranks that compute unequally many samples: a batch sampler.

    Every sample of an epoch is in one micro-batch of one rank; the samples of a global batch do not
    depend on how it is cut. An incomplete global batch at the end is left out.
    """

    def __init__(
        self,
        num_samples: int,
        shares: BatchShares,
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """
        Args:
            num_samples: length of the dataset.
            shares: who computes how much.
            rank: this rank.
            shuffle: whether each epoch has an order of its own, the same on all ranks.
            seed: of the orders.

        Raises:
            ConfigError: the dataset is smaller than a global batch, or there is no such rank.
        """
        if not 0 <= rank < len(shares.sizes):
            raise ConfigError(f"rank {rank} of {len(shares.sizes)} batch sizes: give one a rank")
        if num_samples < shares.global_batch:
            raise ConfigError(
                f"the dataset has {num_samples} samples, a global batch {shares.global_batch}: use "
                "a larger dataset or a smaller batch"
            )
        self._num_samples = num_samples
        self._shares = shares
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is over this epoch's order."""
        self._epoch = epoch

    def __len__(self) -> int:
        steps = self._num_samples // self._shares.global_batch
        return steps * len(self._shares.micro_batches(self._rank))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        batch = self._shares.global_batch
        own = self._shares.first_sample(self._rank)
        for start in range(0, self._num_samples - batch + 1, batch):
            at = start + own
            for size in self._shares.micro_batches(self._rank):
                yield [int(index) for index in order[at : at + size]]
                at += size

    def _order(self) -> Sequence[int]:
        if not self._shuffle:
            return range(self._num_samples)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order: list[int] = torch.randperm(self._num_samples, generator=generator).tolist()
        return order
