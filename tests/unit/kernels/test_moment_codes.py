"""Codes of moments in fewer bytes, and the random bits that round them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from kernel_cases import same_bits
from support.reference_adam import random_bits, read_moments, stored_moments

from hytrain.kernels.moment_codes import part_of, read_moment, write_moment
from hytrain.kernels.moments import EightBit, Moment, Rounding, rounding_key, zero_moment

# -- moments as fp32 and back ------------------------------------------------------------------

KINDS = (torch.bfloat16, torch.uint8)


def moments_at(scale: float, spread: float, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second moments whose magnitudes spread by so many decades."""
    generator = torch.Generator().manual_seed(seed)

    def values() -> torch.Tensor:
        exponents = torch.randn(n, generator=generator) * spread
        found = torch.randn(n, generator=generator) * 10**exponents * scale
        found[torch.rand(n, generator=generator) < 0.1] = 0.0
        return found

    return values(), (values() ** 2).clamp(max=3e38)


@pytest.mark.parametrize("kind", KINDS, ids=str)
# From squares below fp32's normal numbers to those near its largest.
@pytest.mark.parametrize("scale", [1e-45, 1e-38, 1e-24, 1e-22, 1e-19, 1e-10, 1.0, 1e10, 1e18])
def test_values_that_were_read_are_kept_as_they_were(kind: torch.dtype, scale: float) -> None:
    for seed in range(12):
        n = 40 + 97 * seed
        m, v = moments_at(scale, seed / 4, n, seed)
        stored = stored_moments(m, v, kind, Rounding(seed, 1), 3)
        expected = [values[:n] for values in read_moments(*stored)]
        for number, moment in enumerate(stored):
            is_second = number == 1
            values = read_moment(moment, n, is_second=is_second)
            assert same_bits(values, expected[number])
            again = zero_moment(kind, n)
            write_moment(again, values, is_second=is_second)
            assert same_bits(read_moment(again, n, is_second=is_second), values), (seed, is_second)


def test_codes_with_another_exponent_than_the_largest_needs() -> None:
    """The case that makes a block of codes ambiguous occurs, so the test above has met it."""
    found = 0
    for seed in range(40):
        m, v = moments_at(1.0, 0.5, 640, seed)
        stored = stored_moments(m, v, torch.uint8, Rounding(seed, 1), 3)
        again = zero_moment(torch.uint8, 640)
        write_moment(again, read_moment(stored[0], 640, is_second=False), is_second=False)
        assert isinstance(again, EightBit)
        assert isinstance(stored[0], EightBit)
        largest = read_moment(stored[0], 640, is_second=False).abs().view(-1, 64).amax(1)
        least = (largest.view(torch.int32) + (2**23 - 1 - (2**23 - 2**19 - 2**16))) >> 23
        found += int((least < stored[0].exponents.int()).sum())
    assert found >= 3


@pytest.mark.parametrize("is_second", [False, True])
def test_other_values_become_the_nearest(is_second: bool) -> None:
    m, v = moments_at(1e-3, 0.1, 6400, 0)
    values = v if is_second else m
    for kind, most in ((torch.bfloat16, 2**-8), (torch.uint8, 2**-4)):
        moment = zero_moment(kind, values.numel())
        write_moment(moment, values, is_second=is_second)
        read = read_moment(moment, values.numel(), is_second=is_second)
        largest = values.abs().view(-1, 64).amax(1, keepdim=True).sqrt()
        small = (largest**2 / 4096 if not is_second else largest**2 / 2**12).expand(-1, 64)
        error = (read - values).abs()
        assert bool((error <= most * values.abs() + small.reshape(-1)).all())
        assert float(error.max()) > 0.0
        if is_second:  # the denominator of an update must not be lost
            assert bool((read[values > 0] > 0).all())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_takes_its_block_with_it(bad: float) -> None:
    values = torch.arange(192, dtype=torch.float32)
    values[70] = bad
    for is_second in (False, True):
        moment = zero_moment(torch.uint8, 192)
        write_moment(moment, values, is_second=is_second)
        read = read_moment(moment, 192, is_second=is_second)
        assert bool(read[64:128].isnan().all())
        assert bool(read[:64].isfinite().all())
        assert bool(read[128:].isfinite().all())


def test_a_part_is_a_view_of_whole_blocks() -> None:
    moment: Moment = zero_moment(torch.uint8, 200)
    write_moment(part_of(moment, 64, 150), torch.ones(86), is_second=False)
    read = read_moment(moment, 200, is_second=False)
    assert bool(((read[64:150] - 1.0).abs() <= 2**-5).all())
    assert not read[:64].any()
    assert not read[150:].any()


# -- the bits that round moments ---------------------------------------------------------------

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
