"""The bits that round moments: no bias, no correlation of neighbours, moments or steps."""

from __future__ import annotations

import itertools

import numpy as np
from support.reference_adam import random_bits

from hytrain.kernels.moments import Rounding, rounding_key

N = 2**18
STEPS = (1, 2, 3, 1000, 1001)


def draws(rounding: Rounding, step: int) -> list[np.ndarray]:
    """What rounds bf16's m and v, and the codes of m and v, as uniform numbers in (-0.5, 0.5)."""
    h = random_bits(rounding, step, N)
    parts = (h & 0xFFFF, 16), (h >> 16, 16), (h >> 13, 19), (h & (2**18 - 1), 18)
    return [(part + 0.5) / 2.0**bits - 0.5 for part, bits in parts]


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard errors of independent uniform numbers."""
    return abs(float((a * b).mean())) * 12 * len(a) ** 0.5


def test_no_bit_is_biased() -> None:
    for step in STEPS:
        h = random_bits(Rounding(7, 1), step, N)
        for bit in range(32):
            ones = int(((h >> np.uint32(bit)) & np.uint32(1)).sum())
            assert abs(ones - N / 2) < 5 * N**0.5 / 2, (step, bit)


def test_neighbours_and_moments_are_not_correlated() -> None:
    for step in STEPS[:2]:
        parts = draws(Rounding(7, 1), step)
        for (i, a), (j, b) in itertools.product(enumerate(parts), repeat=2):
            for distance in (1, 2, 3, 8, 15, 16, 17, 64, 1024):
                assert correlation(a[:-distance], b[distance:]) < 5.5, (i, j, distance)
        assert correlation(parts[0], parts[1]) < 5.5  # bf16: m and v of one element
        assert correlation(parts[2], parts[3]) < 5.5  # codes: likewise


def test_rare_events_of_sixteen_neighbours_are_independent() -> None:
    """Those share a mixed key; a moment near a code rounds away with a small probability."""
    for part in draws(Rounding(9, 4), 12):
        for probability in (0.5, 0.1, 0.01):
            event = (part + 0.5 < probability).reshape(-1, 16).astype(float)
            spread = (probability * (1 - probability)) ** 0.5
            z = (event.mean(axis=0) - probability) / spread * len(event) ** 0.5
            assert np.abs(z).max() < 5
            covariance = np.cov(event.T) / spread**2
            np.fill_diagonal(covariance, 0)
            assert np.abs(covariance).max() * len(event) ** 0.5 < 6


def test_steps_parameters_seeds_and_upper_indices_are_apart() -> None:
    base = Rounding(7, 1)
    others = [
        (base, 2),
        (Rounding(8, 1), 1),
        (Rounding(7, 2), 1),
        (Rounding(7, 1, 2**32), 1),
        (Rounding(7, 1, 64), 1),
    ]
    first = draws(base, 1)
    for rounding, step in others:
        for a, b in zip(first, draws(rounding, step), strict=True):
            assert correlation(a, b) < 5.5
    keys = {
        rounding_key(Rounding(s, p), t) for s in range(20) for p in range(20) for t in range(20)
    }
    assert len(keys) > 8000 - 20  # of 2**32: hardly a collision


def test_the_bits_are_those_of_the_index() -> None:
    """A part of a parameter draws what the whole would."""
    whole = random_bits(Rounding(7, 1), 5, N)
    for first in (64, 4096, N - 64):
        part = random_bits(Rounding(7, 1, first), 5, N - first)
        assert (part == whole[first:]).all()
