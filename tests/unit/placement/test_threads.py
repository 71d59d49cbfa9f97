"""How many update threads a step has: simulated machines, noise and drift, several ranks."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from hytrain.offload.threads import candidates
from hytrain.placement.paired_trial import VISIT_STEPS
from hytrain.placement.threads import ThreadTrials
from tests.support.machines import Machine

COUNTS = candidates(16)
LAUNCH_BOUND = Machine(26, compute=0.09, cpu=0.1, gpu=0.01)
CPU_BOUND = Machine(26, compute=0.05, cpu=0.3, gpu=0.01)
GPU_BOUND = Machine(26, compute=0.3, cpu=0.2, gpu=0.02)


def _with_threads(machine: Machine, threads: int, *, taken: float, useful: int = 12) -> float:
    """A step's seconds with half of the layers on the CPU.

    Args:
        machine: with the kernel's fastest threads.
        threads: of the kernel.
        taken: seconds by which compute grows for each thread and second of the worker's work.
        useful: threads that memory bandwidth suffices for.
    """
    slower = useful / min(threads, useful)
    return replace(machine, cpu=machine.cpu * slower, interference=taken * threads).step_seconds(13)


def _run(
    step: Callable[[int], float], start: int, seed: int, noise: float = 0.04
) -> tuple[int, float, int]:
    """The count chosen, seconds that its search has cost, and its steps."""
    source = random.Random(seed)
    trials = ThreadTrials(COUNTS, start)
    cost, steps, drift = 0.0, 0, 1.0
    while not trials.settled:
        seen: list[float] = []
        for _ in range(VISIT_STEPS):
            drift = 1.0 + 0.97 * (drift - 1.0) + source.gauss(0.0, 0.02)
            seen.append(step(trials.visiting) * drift * (1.0 + abs(source.gauss(0.0, noise))))
            cost += max(0.0, step(trials.visiting) - step(start))
            steps += 1
        trials.add_visit(statistics.median(seen))
    return trials.chosen, cost, steps


def _step(machine: Machine, *, taken: float, useful: int = 12) -> Callable[[int], float]:
    seconds = {n: _with_threads(machine, n, taken=taken, useful=useful) for n in COUNTS}
    return seconds.__getitem__


@pytest.mark.parametrize("taken", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("machine", [LAUNCH_BOUND, CPU_BOUND, GPU_BOUND])
def test_what_is_chosen_is_no_slower(machine: Machine, taken: float) -> None:
    step = _step(machine, taken=taken)
    passed_by = 0
    for start in (8, 12, 15):
        for seed in range(20):
            chosen, cost, steps = _run(step, start, seed)
            assert step(chosen) <= 1.01 * step(start)
            assert steps <= 12 * VISIT_STEPS
            # Where nothing is gained, it has cost less than 1 % of the first 500 steps.
            assert chosen != start or cost < 0.01 * 500 * step(start)
            index = COUNTS.index(chosen)
            near = COUNTS[max(0, index - 1) : index + 2]
            passed_by += step(chosen) > 1.1 * min(step(count) for count in near)
    assert passed_by <= 6  # of 60: by noise, or because no more comparisons are made


def test_fewer_where_they_take_the_launching_threads_cores() -> None:
    step = _step(LAUNCH_BOUND, taken=0.1, useful=8)
    assert statistics.mean(_run(step, 15, seed)[0] <= 12 for seed in range(20)) >= 0.7


def test_more_where_updates_are_what_a_step_waits_for() -> None:
    step = _step(CPU_BOUND, taken=0.0, useful=15)
    assert statistics.mean(_run(step, 8, seed)[0] >= 12 for seed in range(20)) >= 0.9


def test_noise_alone_changes_nothing() -> None:
    assert [_run(lambda _: 0.1, 12, seed)[0] for seed in range(40)].count(12) >= 38


def test_one_count_is_settled() -> None:
    assert ThreadTrials([2], 2).settled


def test_ranks_agree() -> None:
    """They have other counts and other times, and are told of the slowest."""
    ranks = [ThreadTrials(COUNTS, 12), ThreadTrials(candidates(8), 6)]
    source = random.Random(0)
    while not ranks[0].settled:
        slowest = max(0.1 + 0.002 * rank.visiting for rank in ranks) * source.uniform(0.99, 1.01)
        for rank in ranks:
            rank.add_visit(slowest)
    assert ranks[1].settled
    # Both have gone the same way by as many counts.
    assert COUNTS.index(ranks[0].chosen) == candidates(8).index(ranks[1].chosen)
