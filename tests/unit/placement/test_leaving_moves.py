"""Moves off the GPU that had to be undone make the next ones wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hytrain.placement.leaving_moves import LeavingMoves
from tests.support.machines import Machine, ManagedTraining

SHORT = Machine(26, compute=0.161, cpu=0.12, gpu=0.003, noise=0.015)
LONG = Machine(34, compute=0.3, cpu=0.5, gpu=0.02, noise=0.015)


def test_they_are_allowed_until_one_is_undone() -> None:
    moves = LeavingMoves()
    moves.see_move(10, 0, 8)
    moves.see_move(20, 8, 12)
    moves.see_move(30, 12, 5)
    assert moves.are_allowed(31)
    moves.see_move(40, 5, 11)
    assert not moves.are_allowed(139)
    assert moves.are_allowed(140)


def test_each_that_is_undone_makes_the_next_wait_twice_as_long() -> None:
    moves = LeavingMoves()
    step = 0
    for pause in (100, 200, 400, 800, 1600, 1600):
        moves.see_move(step, 8, 4)
        moves.see_move(step, 4, 6)
        moves.see_move(step, 6, 8)  # the same undoing goes on
        assert not moves.are_allowed(step + pause - 1)
        step += pause
        assert moves.are_allowed(step)


def beside_a_neighbour(training: ManagedTraining, beside: Machine, steps: int) -> float:
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
        training = ManagedTraining(alone, seed)
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
    training = ManagedTraining(dear)
    training.run(60)
    beside_a_neighbour(training, replace(dear, cpu=1.9 * dear.cpu), 300)
    training.machine = replace(dear, compute=1.2)
    training.run(40)
    assert training.regret < 0.03
