"""What has failed waits, each time for twice as long; a neighbour on the host is not followed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hytrain.placement.backoff import FIRST_PAUSE, Backoff
from tests.support.machines import Machine, Training

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


@pytest.mark.parametrize("factor", [1.5, 1.9])
@pytest.mark.parametrize("alone", [SHORT, LONG])
def test_a_neighbour_that_comes_and_goes_is_not_followed_each_time(
    alone: Machine, factor: float
) -> None:
    moves, regrets = 0, []
    seeds = range(4)
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
