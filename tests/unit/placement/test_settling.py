"""The solver on machines whose steps are not what it predicts: where it settles, and how soon."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from hytrain.cost.prediction import predict
from hytrain.formats.moment_kinds import state_bytes
from hytrain.placement.costs import MemoryLimits
from hytrain.placement.measure import MANY_STEPS
from hytrain.placement.records import Decision
from hytrain.placement.solve_schedule import SolveSchedule
from hytrain.tools.explain.candidates import candidate_rows
from tests.support.covering import everyday
from tests.support.machines import PARAMETERS, Machine, Training

# 0.95 B and 0.37 B on an H100 with 16 cores, about: forward and backward, all on CPU, on GPU.
LAUNCH_BOUND = Machine(18, compute=0.051, cpu=0.16, gpu=0.007, interference=0.25, launches=0.01)
SMALL = Machine(26, compute=0.091, cpu=0.07, gpu=0.003, interference=0.9, launches=0.015)
GPU_BOUND = Machine(34, compute=0.300, cpu=0.50, gpu=0.020)
HIDDEN = Machine(34, compute=1.2, cpu=0.50, gpu=0.020)
# Steps that are up to 7 % longer than predicted while the CPU updates.
LATE = Machine(26, compute=0.71, cpu=0.50, gpu=0.015, late=0.1)
DEAR_LAUNCHES = Machine(24, compute=0.05, cpu=0.06, gpu=0.002, interference=0.1, launches=0.08)
MACHINES = {
    "launch-bound": LAUNCH_BOUND,
    "small": SMALL,
    "gpu-bound": GPU_BOUND,
    "hidden": HIDDEN,
    "late": LATE,
    "dear launches": DEAR_LAUNCHES,
}


@everyday({"name": list(MACHINES), "noise": (0.04, 0.0, 0.02)}, pairs=False)
def test_it_settles_near_the_best_and_stays(name: str, noise: float) -> None:
    for seed in range(3):
        training = Training(replace(MACHINES[name], noise=noise), seed)
        training.run(100)
        assert training.regret < 0.03 + noise, training.controller.decisions[-1].reason
        assert training.run(300) <= 2
        assert training.regret < 0.03 + noise


@pytest.mark.parametrize(
    ("name", "drift"),
    [("launch-bound", 0.08), ("launch-bound", 0.2), ("small", 0.08), ("gpu-bound", 0.015)],
)
def test_it_does_not_follow_a_host_that_is_now_slow_now_fast(name: str, drift: float) -> None:
    moves, regret = 0, 0.0
    seeds = range(5)
    for seed in seeds:
        training = Training(replace(MACHINES[name], noise=drift / 2, drift=drift), seed)
        training.run(100)
        moves += training.run(300)
        regret += training.regret
    assert moves / len(seeds) <= 2
    assert regret / len(seeds) < 0.05


def test_launch_bound_steps_do_not_follow_free_memory_that_wavers() -> None:
    training = Training(replace(LAUNCH_BOUND, noise=0.03))
    wavering = random.Random(1)

    def limits() -> MemoryLimits:
        fits = 12 + wavering.choice([0, 0, 1])
        return replace(training.limits, gpu=state_bytes("fp32", PARAMETERS) * fits + PARAMETERS)

    def run(steps: int) -> int:
        moves = 0
        for _ in range(steps):
            training.limits = limits()
            moves += training.run(1)
        return moves

    run(80)
    last = training.controller.decisions[-1]
    assert 8 < last.bounds.max_gpu_layers - 1 <= training.controller.num_gpu_layers < 14
    assert run(200) <= 2
    # Much more fits: it is used.
    training.limits = replace(training.limits, gpu=None)
    training.run(60)
    assert training.controller.num_gpu_layers == 18


@pytest.mark.parametrize(("name", "is_bound"), [("launch-bound", True), ("gpu-bound", False)])
def test_where_launch_bound_steps_have_settled_the_host_estimates_nothing(
    name: str, is_bound: bool
) -> None:
    training, asked = Training(MACHINES[name]), Counter[str]()
    training.run(100)
    estimate = training.estimator.costs
    training.estimator.costs = lambda: asked.update(["costs"]) or estimate()
    training.run(40)
    assert (not asked) is is_bound


def test_launch_bound_steps_that_become_gpu_bound_are_followed() -> None:
    training = Training(replace(LAUNCH_BOUND, noise=0.03))
    training.run(100)
    assert training.controller.num_gpu_layers == 18
    training.machine = replace(training.machine, compute=0.4, interference=0.0, launches=0.0)
    training.run(10)
    assert training.controller.moves.target < 18
    training.run(20)
    assert training.controller.num_gpu_layers < 5
    assert training.regret < 0.03


def test_steps_that_are_little_longer_but_no_more_launch_bound_are_solved_for() -> None:
    training = Training(replace(LAUNCH_BOUND, noise=0.03))
    training.run(100)
    assert training.controller.num_gpu_layers == 18
    # Nobody else's work keeps the launching thread from its core any more.
    training.machine = replace(training.machine, compute=0.066, cpu=0.05, interference=0.0)
    training.run(200)
    assert training.controller.num_gpu_layers < 5


def test_a_decision_keeps_what_measurements_added() -> None:
    training = Training(DEAR_LAUNCHES)
    training.run(60)
    last = training.controller.decisions[-1]
    assert last.costs is not None
    assert any(abs(seconds) > 0.001 for seconds in last.corrections)
    number = last.gpu_layers_target
    plain = predict(last.costs).step_seconds[number]
    assert last.predicted_seconds == pytest.approx(plain + last.corrections[number])
    assert Decision.from_json(json.loads(json.dumps(last.to_json()))) == last
    row = candidate_rows(last, lambda _: None)[number]
    assert row.predicted_seconds == pytest.approx(last.predicted_seconds)


@pytest.mark.parametrize(
    ("name", "most"),
    # Where launches are dear besides, which no cost shows, what fewer layers win is not predicted.
    [("launch-bound", 0.03), ("small", 0.03), ("dear launches", 0.17)],
)
def test_it_settles_where_waits_hide_that_steps_are_launch_bound(name: str, most: float) -> None:
    for seed in range(3):
        machine = replace(MACHINES[name], waits_hide=True, noise=0.03)
        training = Training(machine, seed, gpu_layers=machine.layers)
        training.run(150)
        assert training.regret < most, training.controller.decisions[-1].reason
        assert training.run(300) <= 2
        assert training.regret < most


def test_a_step_that_was_predicted_far_too_short_is_left_again() -> None:
    # Not launch-bound, as far as is seen: nothing but the measured steps tells.
    machine = replace(HIDDEN, saved=0.4)
    training = Training(machine, gpu_layers=machine.layers)
    training.run(120)
    assert training.controller.num_gpu_layers == machine.layers


def test_the_cases_are_what_they_are_called() -> None:
    def choice(machine: Machine) -> int:
        return min(range(machine.layers + 1), key=machine.step_seconds)

    assert choice(LAUNCH_BOUND) == 18
    assert choice(SMALL) == 26
    assert 0 < choice(GPU_BOUND) < 34
    assert choice(HIDDEN) < 5
    assert choice(DEAR_LAUNCHES) < 24
    # From where nothing is on the GPU, the model alone chooses worse.
    for machine in (LAUNCH_BOUND, SMALL):
        here = Training(machine)
        predicted = here.controller
        predicted.consider(4, partial(machine.costs, 0), here.limits)
        assert machine.step_seconds(predicted.moves.target) > 1.03 * machine.best()


def test_a_launch_bound_step_without_any_update_on_the_cpu_is_tried_once() -> None:
    # Nothing that is measured at other placements shows what the worker's last layer costs.
    machine = replace(LAUNCH_BOUND, interference=1e-9, gpu=0.02, saved=0.02)
    without = replace(machine, interference=0.0)  # not launch-bound, so never tried
    for found, expected in ((Training(machine), True), (Training(without), False)):
        found.run(150)
        assert (found.controller.num_gpu_layers == 18) is expected
        assert (found.regret < 0.01) is expected
    dear = Training(replace(machine, saved=-0.02))
    dear.run(150)
    assert dear.controller.num_gpu_layers < 18
    reasons = [d.reason for d in dear.controller.decisions]
    assert sum("18 of 18 layers to the GPU" in reason for reason in reasons) <= 2  # in turns


@pytest.mark.parametrize("seed", range(6))
def test_a_real_change_is_followed(seed: int) -> None:
    training = Training(replace(GPU_BOUND, noise=0.02), seed)
    training.run(200)
    # Half of the cores are taken away.
    training.machine = replace(training.machine, cpu=1.4)
    assert training.regret > 0.1
    training.run(15)
    assert training.controller.moves.target != 0
    training.run(60)
    assert training.regret < 0.05
    # A batch that is four times as long hides it all again.
    training.machine = replace(training.machine, compute=4 * GPU_BOUND.compute)
    training.run(80)
    assert training.regret < 0.05


def test_steps_measured_between_two_solves_count_at_the_next() -> None:
    """Every fourth step is measured, an odd one; with an even interval no solve is at one."""
    considered: list[int] = []
    controller: Any = SimpleNamespace(
        moves=SimpleNamespace(is_settled=True),
        is_due=lambda step: step % 2 == 0,
        streams=False,
        add_step=lambda _seconds: None,
        consider=lambda step, *_rest, **_more: considered.append(step),
    )
    estimator: Any = SimpleNamespace(
        add_samples=lambda _samples: 1.0,
        is_changing=False,
        step_seconds=None,
        num_samples=MANY_STEPS,
        costs=None,
        launch_bound=False,
    )
    limits: Any = None
    schedule = SolveSchedule(controller, estimator, lambda _step: limits)
    for step in range(40):
        schedule.steps = step
        if step % 4 == 1:
            sample: Any = SimpleNamespace(seconds=1.0)
            schedule.add_samples([sample])
        schedule.consider()
    assert considered == list(range(2, 40, 4))
