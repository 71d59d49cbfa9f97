"""The samples of a stage of unequal GPUs, dealt so that its slowest replica is fastest.

The problem of uneven data parallelism (Cephalo, :mod:`hytrain.tools.uneven`) in a stage: replica
i takes T_i(h) for h samples; minimise the largest T_i(h_i) with sum h_i given. For a limit T the
numbers of samples a replica may have are a set, and what several have together a sum of sets, here
the bits of whole numbers; the least T for which the sum has all samples is found by bisection over
the times that there are. Exact for the time of the whole model, whichever layers the stage has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def fastest_split(times: Sequence[Sequence[float]], counts: Sequence[int]) -> tuple[int, ...]:
    """Samples of each replica.

    Args:
        times: of each kind of replica, by its number of samples from 0; infinite where it cannot
            have so many.
        counts: of replicas of each kind.

    Returns:
        For each replica, kind after kind; of equally good ones those with the most samples first
        in each kind. Empty where nothing fits.
    """
    samples = len(times[0]) - 1
    limits = sorted({time for kind in times for time in kind if time < inf})
    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        if _reached(times, counts, limits[middle])[-1] >> samples & 1:
            high = middle
        else:
            low = middle + 1
    if low == len(limits):
        return ()
    reached = _reached(times, counts, limits[low])
    replicas = [kind for kind, count in enumerate(counts) for _ in range(count)]
    split: list[int] = []
    left = samples
    for number in reversed(range(len(replicas))):
        allowed = times[replicas[number]]
        share = next(
            h
            for h in range(left + 1)
            if allowed[h] <= limits[low] and reached[number] >> (left - h) & 1
        )
        split.append(share)
        left -= share
    return tuple(reversed(split))


def _reached(times: Sequence[Sequence[float]], counts: Sequence[int], limit: float) -> list[int]:
    """Which sums the first replicas can have, as bits: of none, one, two, ..."""
    mask = (1 << len(times[0])) - 1
    reached = [1]
    for kind, count in zip(times, counts, strict=True):
        allowed = [h for h, time in enumerate(kind) if time <= limit]
        for _ in range(count):
            sums = 0
            for h in allowed:
                sums |= reached[-1] << h
            reached.append(sums & mask)
    return reached
