"""When layers move, and when they wait: noise, and what has failed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from placement_cases import TIMES, measured_model

from hytrain.cost.prediction import Candidate
from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.errors import PlacementError
from hytrain.placement.backoff import FIRST_PAUSE, Backoff
from hytrain.placement.choose_gpu_layers import LITTLE_GAIN, Solution, solve, worth_moving
from hytrain.placement.memory import Bounds, gpu_peak_bytes
from tests.support.machines import Machine, Training

full = pytest.mark.parity_full

# -- when the controller moves layers, and that noise does not move them back and forth --------


def solution(steps: list[float], choice: int, bounds: Bounds | None = None) -> Solution:
    """As if these steps had been predicted."""
    return Solution(
        gpu_layers=choice,
        predicted_seconds=steps[choice],
        predictions=tuple(Candidate(k, seconds, 0, 0, 0) for k, seconds in enumerate(steps)),
        corrections=(),
        closed_form_k=0.0,
        bounds=bounds or Bounds(len(steps) - 1, 0, len(steps) - 1),
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
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.parity_full) for s in (1, 2))]
)
def test_noise_makes_no_ping_pong(seed: int, per_layer: bool, clipped_share: float) -> None:
    """200 solves around an optimum, moves being free: it settles, and never comes back to what it
    has left."""
    noise = random.Random(seed)
    costs = measured_model(clipped_share)
    current = 0
    visited = [current]
    for number in range(200):
        found = solve(noisy(costs, noise, per_layer=per_layer), "pipeline", Bounds(26, 0, 26))
        if worth_moving(found, current):
            current = found.gpu_layers
            visited.append(current)
            assert number < 50 or len(visited) <= 4, visited
    assert len(visited) <= 4
    assert visited == sorted(set(visited))
    best = solve(costs, "pipeline", Bounds(26, 0, 26))
    assert best.predictions[current].step_seconds <= best.predicted_seconds * 1.03


# -- what has failed waits, each time for twice as long ----------------------------------------

SHORT = Machine(26, compute=0.161, cpu=0.12, gpu=0.003, noise=0.015)
LONG = Machine(34, compute=0.3, cpu=0.5, gpu=0.02, noise=0.015)


def test_each_failure_makes_the_next_try_wait_twice_as_long() -> None:
    backoff, step = Backoff(), 0
    assert backoff.is_over(step)
    for factor in (1, 2, 4, 8, 16, 16):
        until = backoff.fail(step)
        assert until == step + factor * FIRST_PAUSE
        assert not backoff.is_over(until - 1)
        assert backoff.is_over(until)
        step = until


def beside_a_neighbour(training: Training, beside: Machine, steps: int) -> float:
    """Trains while updates take longer for some twenty steps, then do not, and so on.

    Returns:
        by how much these steps are longer than the best, as a share.
    """
    alone, chance, end = training.machine, random.Random(0), training.step + steps
    taken = best = 0.0
    while training.step < end:
        training.machine = beside if training.machine is alone else alone
        for _ in range(max(5, round(chance.expovariate(1 / 20)))):
            training.run(1)
            taken += training.machine.step_seconds(training.controller.num_gpu_layers)
            best += training.best
    return taken / best - 1.0


@pytest.mark.parametrize(("alone", "factor"), [(SHORT, 1.5), (LONG, 1.9)])
def test_a_neighbour_that_comes_and_goes_is_not_followed_each_time(
    alone: Machine, factor: float
) -> None:
    moves, regrets = 0, []
    seeds = range(2)
    for seed in seeds:
        training = Training(alone, seed)
        training.run(60)
        before = len(training.controller.decisions)
        beside = replace(alone, cpu=factor * alone.cpu)
        regrets.append(beside_a_neighbour(training, beside, 600))
        made = training.controller.decisions[before:]
        moves += sum(d.gpu_layers_before != d.gpu_layers_target for d in made)
    assert moves / len(seeds) <= 12
    assert sum(regrets) / len(seeds) < 0.03


def test_what_wins_much_does_not_wait() -> None:
    """A batch behind which all updates hide, where updates on the GPU are dear."""
    dear = replace(LONG, gpu=0.08)
    training = Training(dear)
    training.run(60)
    beside_a_neighbour(training, replace(dear, cpu=1.9 * dear.cpu), 300)
    training.machine = replace(dear, compute=1.2)
    training.run(40)
    assert training.regret < 0.03


@pytest.mark.parametrize(("allocator", "warns"), [("", True), ("expandable_segments:True", False)])
def test_a_k_that_fills_the_gpu_has_no_room_for_gaps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, allocator: str, warns: bool
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    training = Training(LONG)
    layers = training.controller.decisions[0].layer_bytes
    peak = gpu_peak_bytes(layers, training.limits, 4)
    training.limits = replace(training.limits, gpu=int(1.04 * peak))
    training.run(60)
    assert 0 < training.controller.num_gpu_layers < LONG.layers
    texts = [record.getMessage() for record in caplog.records]
    assert any("gaps between memory blocks" in text for text in texts) == warns
