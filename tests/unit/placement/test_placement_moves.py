"""When the controller moves layers, and that noise does not move them back and forth."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from placement_cases import TIMES, measured_model

from hytrain.cost.prediction import Candidate
from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.errors import PlacementError
from hytrain.placement.choose_gpu_layers import LITTLE_GAIN, Solution, solve, worth_moving
from hytrain.placement.memory import Bounds


def solution(steps: list[float], choice: int, bounds: Bounds | None = None) -> Solution:
    """As if these steps had been predicted."""
    return Solution(
        gpu_layers=choice,
        predicted_seconds=steps[choice],
        predictions=tuple(Candidate(k, seconds, 0, 0, 0) for k, seconds in enumerate(steps)),
        corrections=(),
        closed_form_k=0.0,
        bounds=bounds or Bounds.unlimited(len(steps) - 1),
        reason="",
    )


@pytest.mark.parametrize(
    ("steps", "current", "choice", "expected"),
    [
        ([2.0, 1.0], 1, 1, False),  # there already
        ([2.0, 1.0], 0, 1, True),  # half the step
        ([1.009, 1.0], 0, 1, False),  # less than 1 %
        ([1.012, 1.0], 0, 1, True),  # more
        ([1.0, 1.0], 1, 0, False),  # one layer less is no saving worth a move
        ([1.0, 1.0, 1.0], 2, 0, True),  # two are
        ([1.004, 1.0, 1.0], 2, 0, True),  # at 0.4 % of the step
        ([1.006, 1.0, 1.0], 2, 0, False),  # at 0.6 %
        ([1.0, 1.0, 1.012], 2, 0, True),  # which is not dearer for winning some time as well
        ([1.0, 1.0, 1.0], 0, 2, False),  # the other way there is nothing to win
    ],
)
def test_worth_moving(steps: list[float], current: int, choice: int, expected: bool) -> None:
    assert worth_moving(solution(steps, choice), current) is expected


@pytest.mark.parametrize(("freed", "expected"), [(2, False), (3, True)])
def test_a_saving_is_a_tenth_of_the_layers(freed: int, expected: bool) -> None:
    found = solution([1.0] * 27, 10)
    assert worth_moving(found, 10 + freed) is expected


@pytest.mark.parametrize(("gain", "expected"), [(0.0, False), (0.049, False), (0.051, True)])
def test_what_wins_little_may_have_to_wait(gain: float, expected: bool) -> None:
    found = solution([*[1.0 - gain] * 11, *[1.0] * 16], 10)
    assert worth_moving(found, 20)
    assert worth_moving(found, 20, least_gain=LITTLE_GAIN) is expected
    # But not a move from where it does not fit.
    bounded = solution([1.0] * 27, 10, Bounds(26, 0, 15))
    assert worth_moving(bounded, 20, least_gain=LITTLE_GAIN)


@pytest.mark.parametrize("current", [0, 3])
def test_what_does_not_fit_always_moves(current: int) -> None:
    bounded = solution([1.0, 1.0, 1.0, 1.0], 1, Bounds(3, 1, 2))
    assert worth_moving(bounded, current)
    assert not worth_moving(bounded, 2)


def test_a_number_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"0\.\.1"):
        worth_moving(solution([1.0, 1.0], 0), 2)


# -- noise -------------------------------------------------------------------------------------


def noisy(costs: StepCosts, noise: random.Random, *, per_layer: bool) -> StepCosts:
    """Every time off by up to 2 %: each layer's on its own, or all of one kind together."""

    def factor() -> float:
        return noise.uniform(0.98, 1.02)

    common = {name: factor() for name in TIMES}

    def one(costs: LayerCosts) -> LayerCosts:
        factors = {name: factor() for name in TIMES} if per_layer else common
        return replace(costs, **{name: getattr(costs, name) * factors[name] for name in TIMES})

    return replace(costs, layers=tuple(one(costs) for costs in costs.layers))


@pytest.mark.parametrize("clipped_share", [0.0, 0.8])
@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_noise_makes_no_ping_pong(seed: int, per_layer: bool, clipped_share: float) -> None:
    """200 solves around an optimum, moves being free: it settles, and never comes back to what it
    has left."""
    noise = random.Random(seed)
    costs = measured_model(clipped_share)
    current = 0
    visited = [current]
    for number in range(200):
        found = solve(noisy(costs, noise, per_layer=per_layer), "pipeline", Bounds.unlimited(26))
        if worth_moving(found, current):
            current = found.gpu_layers
            visited.append(current)
            assert number < 50 or len(visited) <= 4, visited
    assert len(visited) <= 4
    assert visited == sorted(set(visited))
    best = solve(costs, "pipeline", Bounds.unlimited(26))
    assert best.predictions[current].step_seconds <= best.predicted_seconds * 1.03
