"""Times of the collectives that carry a layer, by its size in bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hytrain.comm.collectives import ShardCollectives
from hytrain.formats.profile_file import CollectiveSample
from hytrain.placement.step_timer import Clock
from hytrain.tools.profiler.ranks import Ranks

SIZES = tuple(2**20 * size for size in (1, 4, 16, 64, 256, 512))
"""Bytes of a layer; the last is a layer of 270 M parameters."""
_MOST_ON_CPU = 2**24
"""The largest size without GPUs, where a profile is only for trying it out."""
_REPEATS = 5
_WARM = 2
_SLOW_SECONDS = 0.5
"""Larger sizes are skipped once a collective has taken longer than this."""


def uneven_sizes(elements: int, world_size: int) -> list[int]:
    """Shard sizes from 0.5 to 1.5 times the even one, together at most ``elements``."""
    even = elements // world_size
    spread = max(1, world_size - 1)
    return [even // 2 + even * rank // spread for rank in range(world_size)]


def collective_samples(
    device: torch.device,
    ranks: Ranks,
    *,
    dtype: torch.dtype = torch.bfloat16,
    sizes: Sequence[int] = SIZES,
) -> tuple[CollectiveSample, ...]:
    """Times all-gather and reduce-scatter over all ranks, equal and unequal shards; a collective.

    A time is the median over repeats of the slowest rank's time. A single rank has no samples.
    ``sizes`` are bytes of a layer, all shards together, ascending.
    """
    if ranks.world_size == 1:
        return ()
    collectives = ShardCollectives(None)
    samples: list[CollectiveSample] = []
    if device.type != "cuda":
        sizes = [size for size in sizes if size <= _MOST_ON_CPU]
    for num_bytes in sizes:
        per_rank = max(2, num_bytes // dtype.itemsize // ranks.world_size)
        even = [per_rank] * ranks.world_size
        uneven = uneven_sizes(per_rank * ranks.world_size, ranks.world_size)
        flat = torch.zeros(sum(even), dtype=dtype, device=device)
        less = flat[: sum(uneven)]
        mine = torch.empty(even[ranks.rank], dtype=dtype, device=device)
        part = torch.empty(uneven[ranks.rank], dtype=dtype, device=device)
        # The unequal shards make a slightly smaller layer: times are scaled to the full size.
        scale = sum(even) / sum(uneven)
        runs: list[Callable[[], object]] = [
            lambda f=flat, s=even: collectives.all_gather(f, s),
            lambda f=flat, s=even, m=mine: collectives.reduce_scatter(f, s, m),
            lambda f=less, s=uneven: collectives.all_gather(f, s),
            lambda f=less, s=uneven, m=part: collectives.reduce_scatter(f, s, m),
        ]
        times = [_seconds(run, device, ranks) for run in runs]
        samples.append(
            CollectiveSample(
                num_bytes=sum(even) * dtype.itemsize,
                all_gather_ms=1e3 * times[0],
                reduce_scatter_ms=1e3 * times[1],
                uneven_all_gather_ms=1e3 * times[2] * scale,
                uneven_reduce_scatter_ms=1e3 * times[3] * scale,
            )
        )
        if max(times) > _SLOW_SECONDS:
            break  # the same on all ranks: times are those of the slowest
    return tuple(samples)


def _seconds(run: Callable[[], object], device: torch.device, ranks: Ranks) -> float:
    clock = Clock(device)
    for _ in range(_WARM):
        run()
    pairs: list[tuple[Any, Any]] = []
    for _ in range(_REPEATS):
        if device.type != "cuda":
            dist.barrier()  # else the wait for other ranks is counted
        begin = clock.mark()
        run()
        pairs.append((begin, clock.mark()))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    mine = [clock.seconds(begin, end) for begin, end in pairs]
    return statistics.median(max(repeat) for repeat in zip(*ranks.gather(mine), strict=True))
