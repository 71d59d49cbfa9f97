"""Shares of the state and the cuts made for them: exact totals, as many even layers as possible."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain.errors import PlanError
from hytrain.model.partition import PartitionTable, padded_size, partition
from hytrain.tools.planner.shards import UNIT, cut_layers, fill_units, num_even, water_fill

small_ranks = st.integers(min_value=1, max_value=5)


def test_a_rank_short_of_room_hands_its_excess_on() -> None:
    assert water_fill([0.1, 1.0, 1.0], 1.0) == pytest.approx([0.1, 0.45, 0.45])


def test_with_room_for_all_the_split_is_even() -> None:
    assert water_fill([0.5, 0.5, 0.5, 0.25], 1.0) == [0.25] * 4


def test_too_little_room_is_refused() -> None:
    with pytest.raises(PlanError, match=r"room for 0\.75 only"):
        water_fill([0.25, 0.5], 1.0)


@given(rooms=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
def test_units_are_filled_as_level_as_brute_force(rooms: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(rooms)))
    shares = fill_units(rooms, total)
    assert sum(shares) == total
    assert all(0 <= share <= room for share, room in zip(shares, rooms, strict=True))
    level = min(level for level in range(10) if sum(min(level, room) for room in rooms) >= total)
    assert max(shares) == level
    real = water_fill([float(room) for room in rooms], float(total))
    assert math.fsum(real) == pytest.approx(total)
    assert all(abs(a - b) < 1.0 for a, b in zip(shares, real, strict=True))


def test_equal_fractions_cut_as_training_does() -> None:
    sizes = [padded_size(n, 3) for n in (1000, 5000, 5000, 70)]
    assert cut_layers(sizes, [1 / 3] * 3) == partition(sizes, 3, None).cuts


def test_only_the_last_layers_are_uneven() -> None:
    # Quotas of 40 and 120 units: four even layers take 8 of the 40 each, the other six at least 1.
    sizes = [8 * UNIT * 2] * 10
    cuts = cut_layers(sizes, [0.25, 0.75])
    table = PartitionTable(cuts)
    assert [table.is_even(layer) for layer in range(10)] == [True] * 4 + [False] * 6
    assert [table.sizes(layer)[0] // UNIT for layer in range(10)] == [8] * 4 + [3] + [1] * 5


def _totals(cuts: tuple[tuple[int, ...], ...], num_ranks: int) -> list[int]:
    return [sum(row[rank + 1] - row[rank] for row in cuts) // UNIT for rank in range(num_ranks)]


@st.composite
def _layers_and_weights(draw: st.DrawFn, most_layers: int) -> tuple[list[int], list[int]]:
    num_ranks = draw(st.integers(1, 4))
    units = draw(st.lists(st.integers(1, 6), min_size=1, max_size=most_layers))
    weights = draw(st.lists(st.integers(1, 20), min_size=num_ranks, max_size=num_ranks))
    return [unit * num_ranks for unit in units], weights


@given(case=_layers_and_weights(most_layers=8))
def test_totals_are_the_fractions(case: tuple[list[int], list[int]]) -> None:
    units, weights = case
    fractions = [weight / sum(weights) for weight in weights]
    cuts = cut_layers([unit * UNIT for unit in units], fractions)
    for unit, row in zip(units, cuts, strict=True):
        assert row[0] == 0
        assert row[-1] == unit * UNIT
        assert all(b - a >= UNIT and (b - a) % UNIT == 0 for a, b in itertools.pairwise(row))
    exact = [fraction * sum(units) for fraction in fractions]
    least = len(units)
    raised = sum(max(0.0, least - share) for share in exact)
    for total, share in zip(_totals(cuts, len(weights)), exact, strict=True):
        assert total >= least
        assert abs(total - max(share, least)) < 1.0 + raised


@given(case=_layers_and_weights(most_layers=5))
def test_no_choice_of_even_layers_is_larger(case: tuple[list[int], list[int]]) -> None:
    units, weights = case
    num_ranks = len(weights)
    cuts = cut_layers([u * UNIT for u in units], [weight / sum(weights) for weight in weights])
    totals = _totals(cuts, num_ranks)
    possible = 0
    for number in range(len(units) + 1):
        for even in itertools.combinations(range(len(units)), number):
            needed = sum(units[layer] // num_ranks for layer in even) + len(units) - number
            others = sum(units) - sum(units[layer] for layer in even)
            # What is left over must be in the other layers, and fits there by the sums alone.
            if needed <= min(totals) and (others or len(set(totals)) == 1):
                possible = number
    assert num_even(cuts) >= possible


@pytest.mark.parametrize(
    ("sizes", "fractions", "words"),
    [
        ([128], [0.5, 0.6], "sum to 1.1"),
        ([128], [0.0, 1.0], "owns a part"),
        ([192], [0.5, 0.5], "multiples of 128"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    sizes: list[int], fractions: list[float], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        cut_layers(sizes, fractions)
