"""Unequal batches: which samples of the global batch each rank computes, and in which pieces.

Batch and shards are decided independently (the idea of Cephalo): a fast GPU with little memory
computes many samples and owns little state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import Sampler

from hytrain.config import BatchShares
from hytrain.errors import ConfigError

logger = logging.getLogger(__name__)


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
        """``shuffle`` gives each epoch its own order by ``seed``, the same on all ranks.

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
        """Sets the epoch whose order the next iteration has."""
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


class DealtSizes:
    """Warns once if micro-batches do not have the sizes that they were assigned.

    The loss is right all the same, as it is weighted by valid tokens; but the global batch is not
    the one that was asked for, and a plan's times and memory are those of other steps.
    """

    def __init__(self, shares: BatchShares, rank: int) -> None:
        self.sizes = shares.micro_batches(rank)
        self._rank = rank
        self._is_told = False

    def watch(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        """Yields a step's micro-batches, and checks them; fewer if there are no more."""
        for number, size in enumerate(self.sizes):
            try:
                batch = next(micro_batches)
            except StopIteration:
                return
            found = _samples(batch)
            if found not in (None, size) and not self._is_told:
                self._is_told = True
                logger.warning(
                    "rank %d: micro-batch %d of a step has %d samples (its tensors' first "
                    'dimension), but "hytrain.batch_sizes" and "micro_batch_sizes", or the plan, '
                    "say %d: the global batch is another one, unless samples are packed. "
                    "UnequalBatchSampler gives each rank its number",
                    self._rank, number, found, size,
                )  # fmt: skip
            yield batch


def _samples(batch: Any) -> int | None:
    """The first dimension of a micro-batch's tensors; None if they do not agree on it."""
    if isinstance(batch, Mapping):
        values = list(cast("Mapping[Any, Any]", batch).values())
    else:
        values = list(cast("Sequence[Any]", batch)) if isinstance(batch, (tuple, list)) else []
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    lengths = {len(tensor) for tensor in tensors}
    return lengths.pop() if len(lengths) == 1 else None
