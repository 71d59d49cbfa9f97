"""Which slice of each layer a rank owns. Plain numbers, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from hytrain.errors import ConfigError

_Item = TypeVar("_Item")

ALIGNMENT = 64
"""In elements. Every parameter, cut and chunk starts on a multiple (128 bytes in bf16), so that
matrix products on views of the training copy keep their fast paths, and kernels stay vectorized."""


def align_up(elements: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple of ``multiple`` that is not below ``elements``."""
    return -(-elements // multiple) * multiple


def sizes_within(sizes: Sequence[int], low: int, high: int) -> list[int]:
    """Elements of each rank's shard that are in ``[low, high)`` of a layer's flat space."""
    cuts = list(itertools.accumulate(sizes, initial=0))
    return [max(0, min(high, end) - max(low, begin)) for begin, end in itertools.pairwise(cuts)]


def in_buckets(
    items: Iterable[_Item], size: Callable[[_Item], int], limit: int
) -> list[list[_Item]]:
    """Groups neighbours whose sizes sum to ``limit`` at most; a larger item is alone."""
    buckets: list[list[_Item]] = []
    total = 0
    for item in items:
        if not buckets or total + size(item) > limit:
            buckets.append([])
            total = 0
        buckets[-1].append(item)
        total += size(item)
    return buckets


def padded_size(elements: int, num_ranks: int) -> int:
    """A layer's size such that an equal split is exact and every rank owns at least one unit."""
    return align_up(max(elements, 1), ALIGNMENT * num_ranks)


def partition(
    layer_sizes: Sequence[int], num_ranks: int, fractions: Sequence[float] | None
) -> list[list[int]]:
    """Cuts every layer by the fractions (None: equally), on multiples of ``ALIGNMENT``.

    Args:
        layer_sizes: padded size of each layer in elements (see :func:`padded_size`).
        num_ranks: ranks that share the state.
        fractions: one positive number per rank, summing to 1.

    Returns:
        For each layer, the number of elements that each rank owns of it, never 0: slices are in
        the ranks' order.

    Raises:
        ConfigError: the number of fractions is not the number of ranks.
    """
    if fractions is not None and len(fractions) != num_ranks:
        raise ConfigError(
            f'"hytrain.shard_fractions" has {len(fractions)} numbers but the job has {num_ranks} '
            "ranks: give one number a rank, or null for equal shards"
        )
    shares = list(fractions) if fractions is not None else [1.0 / num_ranks] * num_ranks
    return [_cut(size, shares) for size in layer_sizes]


def deal(sizes: Sequence[int], num_ranks: int, fractions: Sequence[float] | None) -> list[int]:
    """Returns the owner of each of some uncut items: largest first, each to the rank with least.

    Args:
        sizes: each item's size.
        num_ranks: ranks that share them.
        fractions: each rank's share of the total; None: equal shares.
    """
    shares = list(fractions) if fractions is not None else [1.0] * num_ranks
    taken, owners = [0] * num_ranks, [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owner = min(range(num_ranks), key=lambda rank: (taken[rank] + sizes[item]) / shares[rank])
        owners[item] = owner
        taken[owner] += sizes[item]
    return owners


def _cut(size: int, shares: Sequence[float]) -> list[int]:
    units = size // ALIGNMENT
    if units < len(shares) or size % ALIGNMENT:
        raise ValueError(f"a layer of {size} elements is not padded for {len(shares)} ranks")
    total = sum(shares)
    cuts = [0]
    cumulative = 0.0
    for rank, share in enumerate(shares[:-1]):
        cumulative += share
        cut = round(units * cumulative / total)
        ranks_left = len(shares) - 1 - rank
        # Every rank owns something: collectives and the update then have no empty case.
        cuts.append(min(max(cut, cuts[-1] + 1), units - ranks_left))
    cuts.append(units)
    return [(end - begin) * ALIGNMENT for begin, end in itertools.pairwise(cuts)]
