"""Costs: sums, JSON, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from placement_cases import TIMES, any_seconds, layer, random_costs, step

from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError


def test_sums() -> None:
    costs = step(
        layer(forward=1, backward=2, cpu_update=3, cpu_commit=2, cpu_preview=2, gpu_update=0.5),
        layer(forward=2, backward=4, cpu_update=6, cpu_commit=4, cpu_preview=4, gpu_update=1.0),
        between=10,
        tail=1,
        clipped_share=0.25,
    )
    assert costs.forward_seconds == 3
    assert costs.backward_seconds == 6
    assert costs.compute_seconds == 3 + 10 + 6 + 1
    assert costs.cpu_seconds == 0.75 * 9 + 0.25 * 12
    assert costs.alpha == 1.5 / 9.75


def test_alpha_without_cpu_work_is_zero() -> None:
    assert step(layer(gpu_update=1)).alpha == 0.0


@given(costs=random_costs(any_seconds))
def test_json_round_trip(costs: StepCosts) -> None:
    assert StepCosts.from_json(json.loads(json.dumps(costs.to_json()))) == costs


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize("name", TIMES)
def test_a_layers_times_are_checked(name: str, bad: float) -> None:
    with pytest.raises(PlacementError, match=f"'layer': {name}"):
        layer(**{name: bad})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("between", -1.0),
        ("tail", math.nan),
        ("clipped_share", 1.5),
        ("clipped_share", math.nan),
        ("chunk_elements", 0),
    ],
)
def test_a_steps_values_are_checked(name: str, bad: float) -> None:
    with pytest.raises(PlacementError, match=name):
        step(layer(), **{name: bad})


def test_a_step_has_layers_and_a_layer_no_fewer_than_no_parameters() -> None:
    with pytest.raises(PlacementError, match="without layers"):
        step()
    with pytest.raises(PlacementError, match="-1 parameters"):
        layer(parameters=-1)
