"""How many replicas each pool gives to each stage, where the stages' kinds are chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hytrain.tools.hybrid.pools.kinds import Kind, usage
from hytrain.tools.hybrid.pools.problem import Floats

_MOST_TRIES = 500


def find_counts(
    kinds: Sequence[Kind], dp: int, gpus: Sequence[int], weights: Floats
) -> tuple[list[tuple[int, ...]] | None, bool]:
    """Replicas of each stage by the members of its kind, every member at least one.

    Stages like the one before come first, since equal neighbours send to themselves.

    Args:
        kinds: of the stages.
        dp: replicas of each stage.
        gpus: of each pool.
        weights: of :func:`.kinds.weights_of`, to see early that the rest cannot fit.

    Returns:
        The counts, or None; and whether None is proven, rather than given up.
    """
    least = usage(list(kinds), weights) * dp
    rest = np.vstack([np.cumsum(least[::-1], axis=0)[::-1], np.zeros(len(weights))])
    tries = 0

    def follow(
        index: int, free: list[int], previous: tuple[int, ...]
    ) -> list[tuple[int, ...]] | None:
        nonlocal tries
        if index == len(kinds):
            return []
        for counts in _splits(kinds[index], dp, free, previous):
            tries += 1
            if tries > _MOST_TRIES:
                return None
            left = list(free)
            for (pool, tp), count in zip(kinds[index], counts, strict=True):
                left[pool] -= tp * count
            if np.any(rest[index + 1] > weights @ np.array(left) + 1e-9):
                continue
            found = follow(index + 1, left, counts)
            if found is not None:
                return [counts, *found]
        return None

    counts = follow(0, list(gpus), ())
    return counts, tries <= _MOST_TRIES


def _splits(
    kind: Kind, dp: int, free: Sequence[int], previous: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Every way to draw dp replicas from the members, the previous stage's first."""
    most = [free[pool] // tp for pool, tp in kind]
    fits = len(previous) == len(kind) and all(a <= b for a, b in zip(previous, most, strict=True))
    if fits:
        yield previous
    for counts in _compositions(dp, most):
        if not fits or counts != previous:
            yield counts


def _compositions(total: int, most: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Tuples of at least 1 and at most ``most`` with this sum, as many of the first as can be."""
    others = len(most) - 1
    if not others:
        if 1 <= total <= most[0]:
            yield (total,)
        return
    low = max(1, total - sum(most[1:]))
    for count in range(min(most[0], total - others), low - 1, -1):
        for tail in _compositions(total - count, most[1:]):
            yield (count, *tail)
