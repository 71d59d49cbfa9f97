"""How many update threads a step has: simulated machines, ranks in lock step, real threads."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, environment, join_process_group, make_config
from support.models import loss_of, make_batch, make_model
from support.traces import Trace, traced_config

from hytrain.engine import build_optimizer
from hytrain.formats import trace_file as names
from hytrain.offload.threads import ThreadChoice, candidates
from hytrain.placement import threads as update_threads
from hytrain.placement.launch_bound import VISIT_STEPS
from hytrain.placement.threads import ThreadTrials, TunedThreads
from tests.support.machines import Machine

# -- how many update threads a step has --------------------------------------------------------

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


# -- update threads tried on steps -------------------------------------------------------------


class _Ranks:
    """Threads that are ranks: a step of all takes what the slowest rank's count makes it take."""

    def __init__(self, counts: Sequence[Sequence[int]]) -> None:
        self._counts = counts
        self.used = [found[-1] for found in counts]
        self.visited: list[set[int]] = [set() for _ in counts]
        self._barrier = threading.Barrier(len(counts), timeout=100)
        self._asked: list[list[int]] = [[] for _ in counts]
        self.tuned: dict[int, TunedThreads] = {}

    def run(self, steps: int, *, late: int = 0) -> None:
        """So many steps of all; rank 0 is not ready before step ``late``."""
        ranks = [
            threading.Thread(target=self._rank, args=(rank, steps, late if rank == 0 else 0))
            for rank in range(len(self._counts))
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()

    def _rank(self, rank: int, steps: int, late: int) -> None:
        now = 0.0

        def use(count: int) -> None:
            self.used[rank] = count
            self.visited[rank].add(count)

        def agree(values: Sequence[int]) -> list[int]:
            self._asked[rank] = list(values)
            self._barrier.wait()
            largest = [max(column) for column in zip(*self._asked, strict=True)]
            self._barrier.wait()
            return largest

        counts = list(self._counts[rank])
        tuned = TunedThreads(ThreadTrials(counts, counts[-1]), use, agree, lambda: now)
        self.tuned[rank] = tuned
        for step in range(steps):
            self._barrier.wait()
            # The more threads beside the launching ones, the longer.
            now += max(0.1 + 0.01 * count for count in self.used)
            self._barrier.wait()
            tuned.end_step(ready=step >= late)


def test_ranks_of_a_host_try_and_keep_the_same() -> None:
    ranks = _Ranks([[4, 6, 7], [4, 6, 7]])
    ranks.run(200)
    assert all(tuned.is_over for tuned in ranks.tuned.values())
    assert ranks.used == [4, 4]
    assert ranks.visited == [{4, 6, 7}, {4, 6, 7}]


def test_all_wait_until_the_last_is_ready() -> None:
    ranks = _Ranks([[4, 6], [4, 6]])
    ranks.run(100, late=100)
    assert ranks.used == [6, 6]
    assert not any(tuned.is_trying or tuned.is_over for tuned in ranks.tuned.values())


def test_ranks_with_other_numbers_of_counts_try_none() -> None:
    ranks = _Ranks([[4, 6, 7], [2]])
    ranks.run(100)
    assert ranks.used == [7, 2]
    assert all(tuned.is_over for tuned in ranks.tuned.values())


def test_a_move_begins_the_comparison_anew() -> None:
    used: list[int] = []
    trials = ThreadTrials([1, 2], 2)
    clock = iter(float(i) for i in range(1000))
    tuned = TunedThreads(trials, used.append, list, lambda: next(clock))
    for step in range(80):
        tuned.end_step(ready=step < 70)
    assert used == [1, 2]
    assert not tuned.is_trying
    for _ in range(100):
        tuned.end_step(ready=True)
    assert tuned.is_over
    assert used[-1] == trials.chosen


def _train(threads: int | None) -> dict[str, dict[str, torch.Tensor]]:
    offload = {"cpu_threads": threads} if threads is not None else {"cpu_threads": None}
    with built(make_model("mlp"), make_config(offload=offload, clipping=0.1)) as engine:
        for number in range(40):
            loss = loss_of(engine(**make_batch("mlp", number)))
            engine.backward(loss)
            engine.step()
        return engine.fp32_state_dict()


@pytest.mark.parametrize("delays", ["", "1:300"])
def test_results_do_not_depend_on_them(monkeypatch: pytest.MonkeyPatch, delays: str) -> None:
    """The worker is told between steps, while it updates."""
    join_process_group()
    expected = _train(1)
    monkeypatch.setattr(
        build_optimizer,
        "place_threads",
        lambda *_, **__: ThreadChoice(3, 1e-9, candidates=(1, 2, 3)),
    )
    monkeypatch.setattr(update_threads, "FIRST_QUESTION", 2)
    monkeypatch.setattr(update_threads, "VISIT_STEPS", 4)
    visits: list[int] = []
    visiting = TunedThreads._visit

    def visited(self: TunedThreads) -> None:
        visiting(self)
        visits.append(self.trials.visiting)

    monkeypatch.setattr(TunedThreads, "_visit", visited)
    with environment("HYTRAIN_DELAYS", delays):
        found = _train(None)
    assert len(set(visits)) > 1
    assert_same_states(found, expected)


def test_a_given_number_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    join_process_group()
    monkeypatch.setattr(TunedThreads, "end_step", lambda *_, **__: pytest.fail("it is given"))
    with built(make_model("mlp"), make_config()) as engine:
        engine.backward(loss_of(engine(**make_batch("mlp", 0))))
        engine.step()


def test_costs_and_traces_tell_the_number_that_was_settled_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    join_process_group()
    choice = ThreadChoice(3, 1e-9, candidates=(1, 2, 3))
    monkeypatch.setattr(build_optimizer, "place_threads", lambda *_, **__: choice)

    def settle_on_two(self: TunedThreads, *, ready: bool) -> bool:
        del ready
        self._steps += 1
        self.trials = ThreadTrials((1, 2, 3), 2)
        self._use(2)
        return self._steps == 2

    monkeypatch.setattr(TunedThreads, "end_step", settle_on_two)
    config = traced_config(tmp_path, (4, 6), offload={"cpu_threads": None})
    with built(make_model("mlp"), config) as engine:
        placement = engine.optimizer.placement
        threads: list[int] = []
        for number in range(8):
            engine.backward(loss_of(engine(**make_batch("mlp", number))))
            engine.step()
            if (costs := placement.costs()) is not None:
                threads.append(costs.update_threads)
    assert threads[-1] == placement.threads.num_threads == 2
    spans = Trace.read(tmp_path / "trace_rank0.json").spans(names.CPU_ADAM)
    assert {span["args"][names.ARG_THREADS] for span in spans} == {2}
