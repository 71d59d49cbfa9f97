"""Steps measured at some numbers of GPU layers, and what they make of predictions for all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_cases import equal_layers

from hytrain.placement.costs import StepCosts
from hytrain.placement.measured_steps import ENOUGH_SAMPLES, MeasuredSteps
from hytrain.placement.prediction import Candidate, predict

COSTS = equal_layers(
    8,
    forward=0.01,
    backward=0.02,
    cpu_update=0.06,
    to_host=0.001,
    to_device=0.001,
    gpu_update=0.001,
)


def candidates(costs: StepCosts) -> tuple[Candidate, ...]:
    return predict(costs).candidates


def measured(**steps: float) -> MeasuredSteps:
    """As many as are enough at each number: ``at_3=0.5``."""
    result = MeasuredSteps()
    for name, seconds in steps.items():
        for _ in range(ENOUGH_SAMPLES):
            result.add(int(name.removeprefix("at_")), seconds, launch_bound=True)
    return result


def corrected(steps: MeasuredSteps, here: int, costs: StepCosts = COSTS) -> list[float]:
    result = steps.correct(costs, candidates(costs), here, candidates, launch_bound=True)
    return [candidate.step_seconds for candidate in result]


def test_nothing_measured_changes_nothing() -> None:
    assert corrected(MeasuredSteps(), 0) == [c.step_seconds for c in candidates(COSTS)]


def test_a_few_steps_are_not_a_measurement() -> None:
    steps = MeasuredSteps()
    for count in range(1, ENOUGH_SAMPLES + 1):
        assert steps.seconds(3) is None
        before = steps.version
        steps.add(3, 1.0, launch_bound=True)
        assert (steps.version > before) is (count == ENOUGH_SAMPLES)
    assert steps.seconds(3) == 1.0
    assert steps.known == [3]


def test_what_was_measured_outranks_what_is_predicted() -> None:
    plain = [candidate.step_seconds for candidate in candidates(COSTS)]
    seconds = corrected(measured(at_2=plain[2] + 0.3, at_6=plain[6] - 0.1), 2)
    assert seconds[2] == pytest.approx(plain[2] + 0.3)
    assert seconds[6] == pytest.approx(plain[6] - 0.1)
    # In between by a straight line, and beyond as at the nearest.
    assert seconds[4] == pytest.approx(plain[4] + 0.1)
    assert seconds[0] == pytest.approx(plain[0] + 0.3)
    assert seconds[8] == pytest.approx(plain[8] - 0.1)


def stretched(gpu_layers: int, slope: float) -> StepCosts:
    """Costs as measured at a placement where the worker slows the host down."""
    alone = COSTS.compute_seconds
    factor = 1.0 + slope * sum(layer.cpu_update for layer in COSTS.layers[gpu_layers:]) / alone
    layers = [
        replace(layer, forward=factor * layer.forward, backward=factor * layer.backward)
        for layer in COSTS.layers
    ]
    return replace(COSTS, layers=tuple(layers))


def truth(gpu_layers: int, slope: float) -> float:
    costs = stretched(gpu_layers, slope)
    return predict(costs, gpu_layers=[gpu_layers]).step_seconds[0]


def seen_at(steps: MeasuredSteps, gpu_layers: int, slope: float) -> None:
    costs = stretched(gpu_layers, slope)
    for _ in range(ENOUGH_SAMPLES):
        steps.add(gpu_layers, truth(gpu_layers, slope), launch_bound=True)
    steps.describe(candidates(costs)[gpu_layers], costs)


@pytest.mark.parametrize("slope", [0.2, 0.6])
def test_interference_shows_in_two_placements_and_predicts_a_third(slope: float) -> None:
    steps = MeasuredSteps()
    seen_at(steps, 0, slope)
    assert steps.interference(0) == 0.0
    seen_at(steps, 4, slope)
    assert steps.interference(4) == pytest.approx(slope, rel=1e-6)
    costs = stretched(4, slope)
    plain = candidates(costs)[8].step_seconds
    assert plain > 1.1 * truth(8, slope)
    assert corrected(steps, 4, costs)[8] == pytest.approx(truth(8, slope), rel=0.02)


def test_where_compute_does_not_change_there_is_none() -> None:
    steps = MeasuredSteps()
    for number in (0, 4, 8):
        seen_at(steps, number, 0.0)
        assert steps.interference(number) == 0.0


def test_a_host_that_became_slower_is_so_for_all() -> None:
    steps = measured(at_3=0.5, at_5=1.0)
    for _ in range(20):
        steps.add(3, 0.5, launch_bound=True)
    assert not any(steps.add(3, 0.6, launch_bound=True) for _ in range(10))
    assert steps.seconds(3) == pytest.approx(0.6)
    assert steps.seconds(5) == pytest.approx(1.2)


def test_another_workload_is_seen_in_few_steps_and_forgets_all_but_the_interference() -> None:
    steps = MeasuredSteps()
    seen_at(steps, 0, 0.4)
    seen_at(steps, 4, 0.4)
    slope = steps.interference(4)
    assert slope > 0.3
    before = truth(4, 0.4)
    for _ in range(20):
        assert not steps.add(4, before, launch_bound=True)
    changed = [steps.add(4, 2.0 * before, launch_bound=True) for _ in range(8)]
    assert changed.count(True) == 1
    assert changed.index(True) < 5
    assert steps.known == [4]
    assert steps.seconds(4) == pytest.approx(2.0 * before)
    assert steps.interference(4) == slope


def test_outliers_change_nothing() -> None:
    steps = measured(at_3=0.5)
    for step in range(60):
        assert not steps.add(3, 3.0 if step % 4 == 0 else 0.5, launch_bound=True)
    assert steps.seconds(3) == 0.5


def test_the_error_of_a_difference_shrinks_with_steps() -> None:
    steps = MeasuredSteps()
    assert steps.error(3, 4) == 0.0
    errors: list[float] = []
    for step in range(24):
        steps.add(3, 1.0 + 0.05 * (-1) ** step, launch_bound=True)
        errors.append(steps.error(3, 4))
    # One that is not known is taken to be as noisy.
    assert errors[23] == pytest.approx(0.1 / 1.349 * 1.2533 * (2 / 24) ** 0.5, rel=0.1)
    assert errors[23] < errors[8] < errors[ENOUGH_SAMPLES - 1]


def test_where_the_gpu_sets_the_pace_a_residual_holds_when_costs_change() -> None:
    steps = MeasuredSteps()
    for number, rest in ((2, 0.03), (6, -0.01)):
        for _ in range(ENOUGH_SAMPLES):
            steps.add(number, candidates(COSTS)[number].step_seconds + rest, launch_bound=False)
        steps.describe(candidates(COSTS)[number], COSTS)
    slower = replace(
        COSTS,
        layers=tuple(
            replace(layer, forward=1.05 * layer.forward, backward=1.05 * layer.backward)
            for layer in COSTS.layers
        ),
    )
    for costs in (COSTS, slower):
        plain = candidates(costs)
        # One step with the new costs has been seen at 6, where training is.
        steps.add(6, plain[6].step_seconds - 0.01, launch_bound=False)
        for _ in range(4):
            steps.add(6, plain[6].step_seconds - 0.01, launch_bound=False)
        result = steps.correct(costs, plain, 6, candidates, launch_bound=False)
        assert result[2].step_seconds == pytest.approx(plain[2].step_seconds + 0.03)
        assert result[6].step_seconds == pytest.approx(plain[6].step_seconds - 0.01)
        assert result[4].step_seconds == pytest.approx(plain[4].step_seconds + 0.01)


def test_between_measured_numbers_there_is_no_second_dip() -> None:
    """Steps with 4 layers are longer than with 7: so are those with fewer."""
    rest = {0: -0.1, 4: 0.15, 7: 0.0}
    steps, plain = MeasuredSteps(), candidates(COSTS)
    for number, more in rest.items():
        for _ in range(ENOUGH_SAMPLES):
            steps.add(number, plain[number].step_seconds + more, launch_bound=False)
        steps.describe(plain[number], COSTS)
    found = steps.correct(COSTS, plain, 7, candidates, launch_bound=False)
    seconds = [candidate.step_seconds for candidate in found]
    for number, more in rest.items():
        assert seconds[number] == pytest.approx(plain[number].step_seconds + more)
    between = plain[3].step_seconds - 0.1 + 0.75 * 0.25
    assert between < seconds[4]
    assert seconds[3] == seconds[4]
    assert seconds[5] == pytest.approx(plain[5].step_seconds + 0.1)  # on the way to the best
    bound = steps.correct(COSTS, plain, 7, candidates, launch_bound=True)
    assert bound[3].step_seconds == pytest.approx(between)


@pytest.mark.parametrize("rest", [0.03, -0.03])
def test_what_is_not_predicted_shrinks_with_the_work_of_the_worker(rest: float) -> None:
    """Beyond the most GPU layers that were measured; steps shorter than predicted say nothing."""
    steps, plain = MeasuredSteps(), candidates(COSTS)
    for _ in range(ENOUGH_SAMPLES):
        steps.add(2, plain[2].step_seconds + rest, launch_bound=False)
    result = steps.correct(COSTS, plain, 2, candidates, launch_bound=False)
    for before, after in zip(plain, result, strict=True):
        share = before.worker_seconds / plain[2].worker_seconds
        added = rest * (min(share, 1.0) if rest > 0.0 else 1.0)
        assert after.step_seconds == pytest.approx(before.step_seconds + added)
    assert plain[-1].worker_seconds == 0.0


def test_where_the_gpu_sets_the_pace_a_change_is_another_workload() -> None:
    steps = MeasuredSteps()
    for number, seconds in ((5, 1.0), (3, 0.5)):
        for _ in range(20):
            assert not steps.add(number, seconds, launch_bound=False)
    changed = [steps.add(3, 0.6, launch_bound=False) for _ in range(8)]
    assert changed.count(True) == 1
    assert steps.known == [3]
    # Steps before the change are not noise of those after it.
    assert steps.error(3, 3) == 0.0
