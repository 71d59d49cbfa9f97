"""Costs, the closed form of them, and records of decisions: sums, JSON, what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placement_cases import TIMES, any_seconds, layer, measured_model, random_costs, step

from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError
from hytrain.placement.choose_gpu_layers import closed_form, solve
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import Bounds
from hytrain.placement.memory_report import table
from hytrain.placement.records import Decision

# -- costs -------------------------------------------------------------------------------------


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


# -- the published formula, its clamps, and what it refuses ------------------------------------

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


# -- decisions survive JSON; what is no record of one is refused -------------------------------


def decision(costs: StepCosts | None) -> Decision:
    num_layers = 3 if costs is None else len(costs.layers)
    bounds = Bounds(num_layers, 0, num_layers)
    found = None if costs is None else solve(costs, "pipeline", bounds)
    return Decision(
        step=7,
        gpu_layers_before=1,
        gpu_layers_target=1 if found is None else found.gpu_layers,
        num_layers=num_layers,
        reason="nothing measured yet" if found is None else found.reason,
        predicted_seconds=None if found is None else found.predicted_seconds,
        measured_seconds=None,
        closed_form_k=None if found is None else found.closed_form_k,
        bounds=bounds,
        costs=costs,
        layer_bytes=tuple(LayerBytes(f"layer {i}", 100 * i) for i in range(num_layers)),
        limits=MemoryLimits(None, 1, 2, 3, 4, gpu_base_at=tuple(range(num_layers))),
        staging_bytes=5,
    )


@given(costs=st.none() | random_costs(any_seconds))
@example(costs=None)  # before anything is measured
@example(costs=measured_model())
def test_round_trip(costs: StepCosts | None) -> None:
    made = decision(costs)
    record = made.to_json()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert Decision.from_json(record) == made
    line = json.loads(json.dumps(made.metrics_record()))
    assert line == {"kind": "decision", "step": 7, "placement": record}


def test_a_record_is_enough_for_the_table() -> None:
    read = Decision.from_json(decision(measured_model()).to_json())
    assert "0 of 26" in table(read.layer_bytes, read.limits, read.staging_bytes, [0])


@pytest.mark.parametrize(
    "change",
    [
        {"bounds": {"num_layers": 3}},
        {"layer_bytes": [3]},
        {"limits": None},
        {"costs": {"layers": []}},
        {"costs": []},
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlacementError):
        Decision.from_json({**decision(None).to_json(), **change})


def test_a_missing_field_is_named() -> None:
    record = decision(None).to_json()
    del record["limits"]
    with pytest.raises(PlacementError, match="limits"):
        Decision.from_json(record)
