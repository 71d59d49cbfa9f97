"""Shares of the state: exact totals, the largest one as small as it can be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain.errors import PlanError
from hytrain.tools.planner.shards import water_fill


def test_a_rank_short_of_room_hands_its_excess_on() -> None:
    assert water_fill([0.1, 1.0, 1.0], 1.0) == pytest.approx([0.1, 0.45, 0.45])


def test_with_room_for_all_the_split_is_even() -> None:
    assert water_fill([0.5, 0.5, 0.5, 0.25], 1.0) == [0.25] * 4


def test_too_little_room_is_refused() -> None:
    with pytest.raises(PlanError, match=r"room for 0\.75 only"):
        water_fill([0.25, 0.5], 1.0)


@given(rooms=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
def test_shares_are_as_level_as_brute_force(rooms: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(rooms)))
    shares = water_fill([float(room) for room in rooms], float(total))
    assert math.fsum(shares) == pytest.approx(total)
    assert all(0.0 <= share <= room for share, room in zip(shares, rooms, strict=True))
    # In steps of a unit: the least level at which all rooms up to it are enough.
    level = min(level for level in range(10) if sum(min(level, room) for room in rooms) >= total)
    assert level - 1.0 < max(shares) <= level or max(shares) == level == 0.0
    # Who has less than the largest share has all that there is room for.
    largest = max(shares)
    for share, room in zip(shares, rooms, strict=True):
        assert share == pytest.approx(min(largest, room))
