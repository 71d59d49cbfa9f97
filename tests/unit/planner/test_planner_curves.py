"""Tables: what was measured, and what follows beyond it."""

from __future__ import annotations

import math

import pytest

from hytrain.errors import PlanError
from hytrain.tools.planner.curves import Table


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
