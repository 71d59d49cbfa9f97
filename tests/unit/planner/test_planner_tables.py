"""Tables of what was measured, data sheets in their place, and shares of the state."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_clusters import planned

from hytrain.errors import PlanError
from hytrain.formats.moment_kinds import MomentsName, state_bytes_each
from hytrain.formats.profile_file import ProfiledModel
from hytrain.tools.planner.allocation import water_fill
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.device_sheets import ModelShape, estimated_cluster
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from

# -- tables ------------------------------------------------------------------------------------


def test_a_table_is_straight_between_its_points() -> None:
    table = Table(((1.0, 2.0), (2.0, 4.0), (6.0, 5.0)))
    sizes = (0.5, 1.0, 1.5, 2.0, 4.0, 6.0, 10.0)
    assert [table.at(size) for size in sizes] == [2.0, 2.0, 3.0, 4.0, 4.5, 5.0, 6.0]


def test_beyond_its_end_a_table_does_not_fall() -> None:
    assert Table(((1.0, 2.0), (2.0, 1.0))).at(5.0) == 1.0


def test_one_point_is_proportional() -> None:
    assert Table(((4.0, 2.0),)).at(6.0) == 3.0


@pytest.mark.parametrize(
    "points", [(), ((0.0, 1.0),), ((2.0, 1.0), (1.0, 2.0)), ((1.0, -1.0),), ((1.0, math.inf),)]
)
def test_what_is_no_table_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(PlanError):
        Table(points)


# -- clusters estimated from data sheets -------------------------------------------------------

BLOCK, OUTSIDE = 202_000_000, 131_000_000


def shape(moments: MomentsName) -> ModelShape:
    """A Llama of 7 B, about."""
    model = ProfiledModel(
        name="seven",
        num_layers=32,
        layer_parameters=BLOCK,
        outside_parameters=(OUTSIDE, OUTSIDE),
        seq_len=1024,
        dtype="bf16",
        boundary_bytes=2 * 1024 * 4096,
        moments=moments,
    )
    return ModelShape(model, hidden=4096, vocabulary=32000)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_state_has_as_many_bytes_as_the_moments_take(moments: MomentsName) -> None:
    profile = estimated_cluster([["l4", "l4"]], shape(moments), memory_bytes=256 << 30)
    base = estimated_cluster([["l4", "l4"]], shape("fp32"), memory_bytes=256 << 30)
    options = PlanOptions(
        batch=8,
        gpu_reserve=lambda total: 0,
        host_reserve=lambda total: 0,
        stage=3,
        interconnect=1e10,
    )
    problem = problem_from(profile, options)
    assert problem.gpu_state_bytes == state_bytes_each(moments)
    plan = planned(problem)
    on_gpu = problem.model.gpu_parts
    on_host = sum(rank.shard_fraction * (1.0 - on_gpu[rank.gpu_layers]) for rank in plan.ranks) * (
        32 * BLOCK + 2 * OUTSIDE
    )
    each = sum(rank.host_bytes for rank in plan.ranks) / on_host
    assert each == pytest.approx(problem.host_state_bytes, rel=0.01)
    # Hardly faster than by the bytes that are swept, and faster than with fp32.
    most = (2 * 12 + 6) / (2 * state_bytes_each(moments) + 6)
    rates = [
        (profile.devices[0].update_rate, base.devices[0].update_rate),
        *[
            (own.rate, plain.rate)
            for own, plain in zip(profile.hosts[0].updates, base.hosts[0].updates, strict=True)
        ],
    ]
    for own, plain in rates:
        assert (own > plain) is (moments != "fp32")
        assert own / plain <= 1.05 * most


# -- shares of the state -----------------------------------------------------------------------


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
