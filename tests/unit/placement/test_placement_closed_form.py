"""The published formula, its clamps, and what it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain.errors import PlacementError
from hytrain.placement.closed_form import closed_form

seconds = st.floats(min_value=1e-6, max_value=1e6)
ratios = st.floats(min_value=0.0, max_value=10.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0.2, 0.5, 0.05), 0.3 / 0.525),  # (0.5 - 0.2) / (1.05 * 0.5)
        ((0.2, 0.0, 0.05), 0.0),  # no update time
        ((0.0, 0.5, 0.0), 1.0),  # no backward, and a free GPU
        ((1e300, 5e-324, 0.0), 0.0),  # denormal
    ],
)
def test_the_formula(arguments: tuple[float, float, float], expected: float) -> None:
    assert closed_form(*arguments) == pytest.approx(expected, rel=1e-15)


@given(t_backward=seconds, t_update=seconds, alpha=ratios)
def test_it_balances_or_is_clamped(t_backward: float, t_update: float, alpha: float) -> None:
    k = closed_form(t_backward, t_update, alpha)
    assert 0.0 <= k <= 1.0
    if t_update <= t_backward:
        assert k == 0.0
    else:
        on_gpu, on_cpu = alpha * k * t_update, k * t_update
        assert t_backward + on_gpu == pytest.approx(t_update - on_cpu, abs=1e-12 * t_update)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_what_is_no_time_is_refused(bad: float, position: int) -> None:
    arguments = [0.2, 0.5, 0.05]
    arguments[position] = bad
    with pytest.raises(PlacementError, match=("t_backward", "t_update", "alpha")[position]):
        closed_form(*arguments)
