"""Decisions survive JSON; what is no record of one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from placement_cases import any_seconds, measured_model, random_costs

from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError
from hytrain.placement.choose_gpu_layers import solve
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import Bounds, table
from hytrain.placement.records import Decision


def decision(costs: StepCosts | None) -> Decision:
    num_layers = 3 if costs is None else len(costs.layers)
    bounds = Bounds.unlimited(num_layers)
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
    assert line == {"step": 7, "placement": record}


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
