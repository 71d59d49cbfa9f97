"""The fast prediction against its slow twin, a run of steps, and what must hold for all costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import (
    TIMES,
    any_seconds,
    layer,
    measured_model,
    random_costs,
    step,
    whole_seconds,
)

from hytrain.cost.prediction import predict
from hytrain.cost.step import LayerCosts, StepCosts
from tests.support.step_twins import predict_one

ROUNDING = 1e-9


def all_steps(costs: StepCosts) -> tuple[float, ...]:
    return predict(costs).step_seconds


@given(costs=random_costs(any_seconds) | random_costs(any_seconds, late=True))
def test_it_agrees_with_its_slow_twin(costs: StepCosts) -> None:
    slow = [predict_one(costs, k) for k in range(len(costs.layers) + 1)]
    assert all_steps(costs) == pytest.approx(slow, rel=1e-9, abs=1e-300)


@given(costs=random_costs(whole_seconds) | random_costs(whole_seconds, late=True))
def test_it_agrees_with_its_slow_twin_where_times_tie(costs: StepCosts) -> None:
    slow = [predict_one(costs, k) for k in range(len(costs.layers) + 1)]
    assert all_steps(costs) == pytest.approx(slow, rel=1e-12)


# -- bounds ------------------------------------------------------------------------------------


@given(costs=random_costs(any_seconds))
def test_no_step_is_shorter_than_its_parts(costs: StepCosts) -> None:
    for found in predict(costs).candidates:
        on_cpu = costs.layers[found.gpu_layers :]
        step_seconds = found.step_seconds * (1 + ROUNDING)
        assert step_seconds >= costs.compute_seconds + found.gpu_update_seconds
        assert step_seconds >= found.worker_seconds
        assert step_seconds >= sum(costs.to_host for costs in on_cpu)
        assert step_seconds >= sum(costs.to_device for costs in on_cpu)
        assert found.exposed_seconds >= 0.0


@given(costs=random_costs(any_seconds))
def test_with_every_layer_on_the_gpu_nothing_waits(costs: StepCosts) -> None:
    last = predict(costs).candidates[-1]
    updates = 0.0
    for layer_costs in costs.layers:
        updates += layer_costs.gpu_update
    assert last.step_seconds == costs.compute_seconds + updates
    assert last.exposed_seconds == last.worker_seconds == 0.0
    assert last.bound == "gpu"


@given(costs=random_costs(any_seconds, shares=[0.0], late=True))
def test_the_worker_passes_over_every_layer_once(costs: StepCosts) -> None:
    for found in predict(costs).candidates:
        first_late = costs.first_late(found.gpu_layers)
        jobs = [
            max(c.cpu_late if index >= first_late else c.cpu_update, c.to_host, c.to_device)
            for index, c in enumerate(costs.layers)
            if index >= found.gpu_layers
        ]
        assert found.worker_seconds == pytest.approx(sum(jobs), rel=1e-12)


# -- directions --------------------------------------------------------------------------------


def scaled(costs: StepCosts, factor: float, *names: str) -> StepCosts:
    def longer(one: LayerCosts) -> LayerCosts:
        return replace(one, **{name: getattr(one, name) * factor for name in names})

    return replace(costs, layers=tuple(longer(one) for one in costs.layers))


def check_none_is_shorter(longer: StepCosts, costs: StepCosts, slack: float = 0.0) -> None:
    for after, before in zip(all_steps(longer), all_steps(costs), strict=True):
        assert after >= before * (1 - ROUNDING) - slack


@given(costs=random_costs(any_seconds), exponent=st.integers(min_value=-8, max_value=8))
def test_scaled_times_scale_the_result(costs: StepCosts, exponent: int) -> None:
    # Powers of two: any other factor could turn a tie of two times over by rounding.
    factor = 2.0**exponent
    longer = replace(
        scaled(costs, factor, *TIMES), between=costs.between * factor, tail=costs.tail * factor
    )
    expected = [seconds * factor for seconds in all_steps(costs)]
    assert all_steps(longer) == pytest.approx(expected, rel=1e-12, abs=1e-290)


factors = st.floats(min_value=1.0, max_value=3.0)


@given(costs=random_costs(any_seconds), factor=factors)
@pytest.mark.parametrize("name", ["forward", "gpu_update"])
def test_slower_compute_never_makes_a_step_shorter(
    name: str, costs: StepCosts, factor: float
) -> None:
    check_none_is_shorter(scaled(costs, factor, name), costs)


@given(costs=random_costs(any_seconds), more=any_seconds)
def test_more_between_is_added_to_every_step(costs: StepCosts, more: float) -> None:
    longer = replace(costs, between=costs.between + more)
    expected = [seconds + more for seconds in all_steps(costs)]
    assert all_steps(longer) == pytest.approx(expected, rel=1e-9)


@given(costs=random_costs(any_seconds, shares=[0.0]), more=any_seconds)
def test_a_longer_tail_never_makes_an_unclipped_step_shorter(costs: StepCosts, more: float) -> None:
    check_none_is_shorter(replace(costs, tail=costs.tail + more), costs)


@pytest.mark.parametrize("clipped_share", [0.0, 0.5, 1.0])
def test_a_slower_worker_makes_no_step_of_the_measured_model_shorter(clipped_share: float) -> None:
    """Not so for all costs: see test_a_slower_worker_can_be_luckier. In a clipped step a job that
    begins later may fall behind the decision, which spares that layer its second pass."""
    costs = measured_model(clipped_share)
    for _ in range(20):
        block = costs.layers[1]
        spared = block.cpu_commit + block.cpu_preview - block.cpu_update
        longer = scaled(costs, 1.05, "cpu_update", "cpu_commit", "cpu_preview")
        check_none_is_shorter(longer, costs, slack=clipped_share * spared)
        costs = longer


@given(costs=random_costs(any_seconds, shares=[0.0]), factor=factors)
def test_a_slower_worker_wins_less_than_the_forward(costs: StepCosts, factor: float) -> None:
    """It can be luckier in its order, but its last job ends no earlier, and a forward pass is all
    that can follow on that."""
    no_copies = scaled(costs, 0.0, "to_host", "to_device")
    longer = scaled(no_copies, factor, "cpu_update")
    check_none_is_shorter(longer, no_copies, slack=costs.forward_seconds)


def test_one_layer() -> None:
    costs = step(layer(forward=1, backward=2, cpu_update=4, gpu_update=3))
    assert all_steps(costs) == (7, 6)
