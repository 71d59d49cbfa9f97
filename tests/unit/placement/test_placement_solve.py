"""The solvers: choices, bounds by memory, and the reasons that they give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import any_seconds, equal_layers, measured_model, random_costs

from hytrain.cost.prediction import predict
from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError
from hytrain.placement.choose_gpu_layers import CPU_SLACK, solve, worth_moving
from hytrain.placement.memory import Bounds

MEASURED = measured_model()
FREE = Bounds(26, 0, 26)


@st.composite
def costs_and_bounds(draw: st.DrawFn) -> tuple[StepCosts, Bounds]:
    costs = draw(random_costs(any_seconds))
    num_layers = len(costs.layers)
    fewest = draw(st.integers(0, num_layers))
    return costs, Bounds(num_layers, fewest, draw(st.integers(fewest, num_layers)))


def near_the_best(steps: dict[int, float]) -> set[int]:
    return {number for number, step in steps.items() if step <= min(steps.values()) * 1.01}


def slower_cpu(costs: StepCosts, by: float) -> StepCosts:
    names = ("cpu_update", "cpu_commit", "cpu_preview")
    layers = [
        replace(layer, **{name: (1 + by) * getattr(layer, name) for name in names})
        for layer in costs.layers
    ]
    return replace(costs, layers=tuple(layers))


@given(problem=costs_and_bounds())
def test_pipeline_takes_the_fewest_near_the_best_that_fits(
    problem: tuple[StepCosts, Bounds],
) -> None:
    costs, bounds = problem
    found = solve(costs, "pipeline", bounds)
    steps = predict(costs).step_seconds
    assert tuple(c.step_seconds for c in found.predictions) == steps
    assert bounds.allow(found.gpu_layers)
    assert found.predicted_seconds == steps[found.gpu_layers]
    slower = predict(slower_cpu(costs, CPU_SLACK)).step_seconds
    expected = min(near_the_best(dict(enumerate(slower))))
    if not bounds.allow(expected):
        fitting = range(bounds.min_gpu_layers, bounds.max_gpu_layers + 1)
        expected = min(near_the_best({k: slower[k] for k in fitting}))
    assert found.gpu_layers == expected


def test_the_choice_holds_where_the_cpu_is_somewhat_slower_than_measured() -> None:
    """Of the fewest layers near the best, one or two are beside steps that are much longer."""
    measured = solve(MEASURED, "pipeline", FREE).gpu_layers
    slower = solve(slower_cpu(MEASURED, 0.04), "pipeline", FREE)
    fewest = min(near_the_best(dict(enumerate(predict(MEASURED).step_seconds))))
    assert fewest < measured <= fewest + 3
    assert not worth_moving(slower, measured)
    assert worth_moving(slower, fewest)


@given(problem=costs_and_bounds())
def test_closed_form_is_rounded_and_clamped(problem: tuple[StepCosts, Bounds]) -> None:
    costs, bounds = problem
    found = solve(costs, "closed_form", bounds)
    exact = found.closed_form_k * len(costs.layers)
    assert found.gpu_layers == bounds.clamp(math.floor(exact + 0.5))


def test_the_measured_model() -> None:
    found = solve(MEASURED, "pipeline", FREE)
    # Measured: 0.529 s with none, 0.344 with 13, 0.346 with 18, 0.349 with all.
    assert 10 <= found.gpu_layers <= 14
    assert found.reason.startswith("host-bound: CPU update 0.497 s > backward 0.216 s; ")
    there = f"{found.gpu_layers} of 26 layers to the GPU; predicted "
    assert f"; {there}{found.predicted_seconds:.3f} s" in found.reason


def test_the_closed_form_of_the_measured_model() -> None:
    found = solve(MEASURED, "closed_form", FREE)
    # alpha = (2.908 / 150) / 0.497 = 0.039; k = (0.497 - 0.216) / (1.039 * 0.497) = 0.544; 14.1.
    assert found.closed_form_k == pytest.approx(0.544, abs=0.001)
    assert found.gpu_layers == 14
    # With alpha = 1: half of 0.565; 7.4.
    assert solve(MEASURED, "closed_form", FREE, alpha=1.0).gpu_layers == 7


def test_half_a_layer_is_rounded_up() -> None:
    # t_B 1, t_U 2, alpha 0: k = 0.5 of one layer.
    assert solve(equal_layers(1, backward=1, cpu_update=2), "closed_form",
                 Bounds(1, 0, 1)).gpu_layers == 1  # fmt: skip


def test_clipping_takes_more_layers() -> None:
    clipped = solve(measured_model(1.0), "pipeline", FREE)
    assert clipped.gpu_layers > solve(MEASURED, "pipeline", FREE).gpu_layers


def test_bounded_by_gpu_memory() -> None:
    found = solve(MEASURED, "pipeline", Bounds(26, 0, 8))
    assert found.gpu_layers == 8
    unbounded = solve(MEASURED, "pipeline", FREE)
    assert found.reason.endswith(
        f"predicted {found.predicted_seconds:.3f} s; bounded by GPU memory "
        f"({unbounded.gpu_layers} would be best: {unbounded.predicted_seconds:.3f} s)"
    )


def test_bounded_by_host_memory() -> None:
    found = solve(MEASURED, "pipeline", Bounds(26, 22, 26))
    assert found.gpu_layers == 22
    assert "22 of 26 layers to the GPU" in found.reason
    assert "host memory does not hold more of the state" in found.reason


def test_the_cpu_keeps_up() -> None:
    costs = equal_layers(20, forward=0.005, backward=0.01, cpu_update=0.002, gpu_update=0.001)
    found = solve(costs, "pipeline", Bounds(20, 0, 20))
    assert found.gpu_layers == 0
    assert found.reason.startswith("the CPU keeps up: CPU update 0.04 s, backward 0.2 s; no layers")


def test_gpu_updates_that_win_nothing() -> None:
    costs = equal_layers(2, forward=1, backward=1, cpu_update=2, gpu_update=9)
    found = solve(costs, "pipeline", Bounds(2, 0, 2))
    assert found.gpu_layers == 0
    assert "GPU updates would save nothing" in found.reason


def test_the_first_layers_end_late() -> None:
    # Layer 0: gradient at 20, update and copy 20..22. That is 2 of 31, and 20 with it on the GPU.
    costs = equal_layers(10, forward=1, backward=2, cpu_update=1.5, to_host=2, gpu_update=0.1)
    found = solve(costs, "pipeline", Bounds(10, 0, 10))
    assert found.gpu_layers > 0
    assert found.reason.startswith(
        "no backward is left to hide the first layers' updates: CPU update 15 s, backward 20 s; "
    )


# -- measured steps ----------------------------------------------------------------------------


def corrections(**residuals: float) -> tuple[float, ...]:
    """Of the predictions for 26 layers: ``at_3=0.5``."""
    known = {int(name.removeprefix("at_")): seconds for name, seconds in residuals.items()}
    found = solve(MEASURED, "pipeline", FREE, residuals=known)
    plain = predict(MEASURED).step_seconds
    for candidate, seconds, more in zip(found.predictions, plain, found.corrections, strict=True):
        assert candidate.step_seconds == pytest.approx(max(0.0, seconds + more))
    return found.corrections


def test_nothing_measured_corrects_nothing() -> None:
    assert solve(MEASURED, "pipeline", FREE).corrections == ()
    assert solve(MEASURED, "pipeline", FREE, residuals={}).corrections == ()


def test_between_measured_numbers_corrections_are_on_a_line() -> None:
    found = corrections(at_2=0.3, at_6=-0.1)
    assert (found[0], found[2], found[6], found[26]) == (0.3, 0.3, -0.1, -0.1)
    assert found[4] == pytest.approx(0.1)


def test_what_is_not_predicted_is_the_cpus_work_and_shrinks_with_it() -> None:
    found = corrections(at_2=0.24)
    assert found[14] == pytest.approx(0.12)
    assert found[26] == 0.0


def test_a_number_whose_steps_were_longer_than_predicted_is_left() -> None:
    first = solve(MEASURED, "pipeline", FREE).gpu_layers
    found = solve(MEASURED, "pipeline", FREE, residuals={first: 0.1})
    assert found.gpu_layers > first
    assert worth_moving(found, first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bounds": Bounds(25, 0, 25)}, "bounds of 25 layers for 26"),
        ({"bounds": Bounds(26, 20, 10)}, "no number of GPU layers fits"),
        ({"method": "guess"}, 'unknown method "guess"'),
        ({"alpha": -1.0}, "alpha"),
    ],
)
def test_what_cannot_be_solved_is_refused(arguments: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"costs": MEASURED, "method": "pipeline", "bounds": FREE}
    with pytest.raises(PlacementError, match=message):
        solve(**usual | arguments)
