"""The controller with a mover that moves nothing: what moves when, and what if it does not fit."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from hytrain.config import SolverConfig
from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.formats.moment_kinds import MasterName
from hytrain.model.state_format import StateFormat
from hytrain.placement.backoff import FIRST_PAUSE
from hytrain.placement.choose_gpu_layers import solve
from hytrain.placement.controller import PlacementController
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import Bounds
from hytrain.placement.records import Decision

L = 20
STEP_MOVES = math.ceil(L / 8)
SIZE = 1_000_000
STATE = 12 * SIZE
PLENTY = MemoryLimits(gpu=None, gpu_reserve=0, gpu_base=0, host=10**12, host_reserve=0)


class FakeMover:
    """Re-places layers at once; refuses when told to."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.gpu_has_room_for = L
        self.host_has_room_for = L
        self.layers: list[Any] = []
        self.releases = 0

    def _number(self, place: str) -> int:
        return sum(layer.placement == place for layer in self.layers)

    def to_gpu(self, layer: Any) -> None:
        if self._number("gpu") >= self.gpu_has_room_for:
            raise torch.OutOfMemoryError("no memory")
        assert layer.placement == "cpu"
        layer.placement = "gpu"
        self.log.append(("gpu", layer.index))

    def to_cpu(self, layer: Any) -> None:
        if self._number("cpu") >= self.host_has_room_for:
            raise MemoryError("host memory for 1.00 GiB cannot be mapped")
        assert layer.placement == "gpu"
        layer.placement = "cpu"
        self.log.append(("cpu", layer.index))

    def release(self) -> None:
        self.releases += 1


class Bench:
    """A controller over twenty equal layers, and what a step is made of."""

    def __init__(
        self,
        begin: int = 0,
        *,
        method: Literal["pipeline", "closed_form"] = "pipeline",
        interval: int = 1,
        solves: bool = True,
        alpha: float | None = None,
        master: MasterName = "fp32",
        save_bytes: int = 0,
    ) -> None:
        self.layers = [
            SimpleNamespace(
                index=i,
                name=f"layer {i}",
                shard_size=SIZE,
                placement="gpu" if i < begin else "cpu",
                form=StateFormat(master=master),
            )
            for i in range(L)
        ]
        self.mover = FakeMover()
        self.mover.layers = self.layers
        layer_bytes = tuple(LayerBytes(layer.name, SIZE, master=master) for layer in self.layers)
        first = Decision(
            step=0,
            gpu_layers_before=begin,
            gpu_layers_target=begin,
            num_layers=L,
            reason="the first",
            bounds=Bounds(L, 0, L),
            layer_bytes=layer_bytes,
            limits=PLENTY,
            save_bytes=save_bytes,
        )
        layers: Any = self.layers
        mover: Any = self.mover
        self.controller = PlacementController(
            layers,
            mover,
            SolverConfig(method=method, alpha=alpha, interval=interval),
            first,
            solves=solves,
        )
        self.step = 0

    @property
    def here(self) -> int:
        # The first ones, with no gap.
        places = [layer.placement for layer in self.layers]
        number = places.count("gpu")
        assert places == ["gpu"] * number + ["cpu"] * (L - number)
        assert self.controller.num_gpu_layers == number
        return number

    def run(self, costs: StepCosts, steps: int = 1, limits: MemoryLimits = PLENTY) -> list[int]:
        """Steps; the number of GPU layers after each."""
        seen: list[int] = []
        for _ in range(steps):
            if self.controller.is_due(self.step):
                self.controller.consider(self.step, lambda: costs, limits)
            self.step += 1
            self.controller.apply_moves(self.step)
            seen.append(self.here)
        return seen


def costs(cpu: float, backward: float = 1.0, gpu: float = 0.0001) -> StepCosts:
    """A step whose CPU updates take ``cpu`` seconds in all, beside one of backward."""
    layers = [
        LayerCosts(
            name=f"layer {i}",
            parameters=SIZE,
            forward=0.5 * backward / L,
            backward=backward / L,
            to_host=0.0,
            cpu_update=cpu / L,
            cpu_commit=cpu / L,
            cpu_preview=cpu / L,
            to_device=0.0,
            gpu_update=gpu / L,
            cpu_late=cpu / L,
        )
        for i in range(L)
    ]
    return StepCosts(tuple(layers))


def best(of: StepCosts, bounds: Bounds | None = None) -> int:
    return solve(of, "pipeline", bounds or Bounds(L, 0, L)).gpu_layers


SLOW, FAST = costs(4.0), costs(0.1)


def limits_for(most: int = L, fewest: int = 0) -> MemoryLimits:
    """Room for so many layers on the GPU, and for all but so many on the host."""
    each = STATE + 2 * SIZE
    return MemoryLimits(
        gpu=most * each, gpu_reserve=0, gpu_base=0, host=(L - fewest) * each, host_reserve=0
    )


def test_the_cases_here_are_what_they_are_called() -> None:
    assert best(SLOW) > L // 2
    assert best(FAST) < 2


def test_layers_move_in_order_and_few_a_step() -> None:
    bench = Bench()
    target = best(SLOW)
    seen = bench.run(SLOW, 20)
    assert seen[:4] == [0, 0, 0, 0]  # nothing is decided from the first steps
    assert seen[-1] == target
    gains = [b - a for a, b in pairwise(seen)]
    assert max(gains) == STEP_MOVES
    assert [g for g in gains if g][:-1] == [STEP_MOVES] * (math.ceil(target / STEP_MOVES) - 1)
    assert bench.mover.log == [("gpu", i) for i in range(target)]
    bench.mover.log.clear()
    bench.run(FAST, 20)
    assert bench.here == best(FAST)
    assert bench.mover.log == [("cpu", i) for i in reversed(range(best(FAST), target))]
    assert bench.mover.releases == 40


def test_every_decision_says_why() -> None:
    bench = Bench()
    bench.run(SLOW, 20)
    first, second = bench.controller.decisions
    assert first.reason == "the first"
    assert (second.step, second.gpu_layers_before, second.gpu_layers_target) == (4, 0, best(SLOW))
    assert second.reason.startswith("host-bound: CPU update 4 s > backward 1 s")
    assert second.costs is SLOW
    assert second.predicted_seconds is not None
    assert second.measured_seconds is None
    bench.controller.measured(1.25)
    bench.controller.measured(9.0)  # the first after the moves
    assert bench.controller.decisions[-1].measured_seconds == 1.25


def test_it_is_not_asked_while_times_are_those_of_another_placement() -> None:
    bench = Bench()
    for _ in range(20):
        if bench.controller.moves.target != bench.here:
            assert not bench.controller.is_due(bench.step)
        bench.run(SLOW)
    assert bench.controller.moves.is_settled
    bench.controller.decide(bench.step, 0, "by hand")
    bench.controller.apply_moves(bench.step, at_once=True)
    assert bench.here == 0
    settled: list[bool] = []
    for step in range(5):
        settled.append(bench.controller.moves.is_settled)
        bench.controller.apply_moves(step)
    assert settled == [False] * 4 + [True]


def test_a_gain_that_is_not_worth_a_move_is_left() -> None:
    bench = Bench(begin=best(SLOW))
    for factor in (0.99, 1.01, 1.005):
        bench.run(costs(4.0 * factor), 6)
    assert bench.mover.log == []
    # The first solve says once why nothing moves.
    _first, stays = bench.controller.decisions
    assert stays.gpu_layers_target == stays.gpu_layers_before == best(SLOW)
    assert stays.costs is not None
    assert stays.reason.startswith("host-bound")
    near = Bench(begin=best(SLOW) + 1)
    near.run(SLOW, 6)
    reason = near.controller.decisions[-1].reason
    few = f"{near.here - 1} of {L} layers on the GPU would save too little"
    assert reason.startswith(f"no change: {few}; ")


@pytest.mark.parametrize("interval", [1, 3, 7])
def test_it_solves_every_interval(interval: int) -> None:
    bench = Bench(interval=interval)
    due: list[int] = []
    for step in range(4, 40):
        bench.controller.moves._settled_steps = 4
        if bench.controller.is_due(step):
            due.append(step)
    assert due == [step for step in range(4, 40) if step % interval == 0]


def test_what_is_fixed_is_not_solved_for() -> None:
    bench = Bench(begin=7, solves=False)
    bench.run(SLOW, 10)
    assert bench.mover.log == []
    bench.controller.solves = True
    bench.run(SLOW, 10)
    assert bench.here == best(SLOW)


@pytest.mark.parametrize("alpha", [None, 0.8])
def test_the_closed_form_is_followed_as_it_is(alpha: float | None) -> None:
    bench = Bench(begin=15, method="closed_form", alpha=alpha)
    measured = costs(4.0, gpu=0.4)
    share = (4.0 - 1.0) / ((1.0 + (0.1 if alpha is None else alpha)) * 4.0)
    expected = math.floor(share * L + 0.5)
    # One layer's difference is worth nothing to the pipeline's hysteresis.
    bench.run(measured, 12)
    assert bench.here == expected
    assert bench.controller.decisions[-1].closed_form_k == pytest.approx(share)
    bench.run(costs(3.8, gpu=0.38), 12)
    share = (3.8 - 1.0) / ((1.0 + (0.1 if alpha is None else alpha)) * 3.8)
    assert bench.here == math.floor(share * L + 0.5)


# -- no memory ---------------------------------------------------------------------------------


def test_memory_bounds_the_target() -> None:
    bench = Bench()
    bench.run(SLOW, 12, limits_for(most=5))
    assert bench.here == 5
    assert "bounded by GPU memory" in bench.controller.decisions[-1].reason
    bench.run(FAST, 12, limits_for(fewest=3))
    assert bench.here == 3
    bench.run(FAST, 12, limits_for(fewest=9))  # the host has less than there was: k rises
    assert bench.here == 9


# -- a rank without samples --------------------------------------------------------------------


def run_idle(bench: Bench, steps: int, limits: MemoryLimits) -> list[int]:
    """Steps of a rank that computes nothing; the number of GPU layers after each."""
    seen: list[int] = []
    for _ in range(steps):
        if bench.controller.is_due(bench.step):
            bench.controller.consider_idle(bench.step, limits, "it computes no samples")
        bench.step += 1
        bench.controller.apply_moves(bench.step)
        seen.append(bench.here)
    return seen


def test_an_idle_gpu_takes_all_that_fits() -> None:
    bench = Bench()
    seen = run_idle(bench, 40, limits_for(most=13))
    assert seen[-1] == 13
    assert max(b - a for a, b in pairwise([0, *seen])) == STEP_MOVES
    _, decision = bench.controller.decisions  # made once
    assert decision.gpu_layers_target == 13
    assert decision.costs is None
    assert "computes no samples" in decision.reason
    assert "13 of 20 layers" in decision.reason
    assert run_idle(bench, 20, limits_for(most=9))[-1] == 9, "others have taken memory there"
    assert run_idle(bench, FIRST_PAUSE // 2, limits_for(most=13))[-1] == 9, "not to and fro"
    assert run_idle(bench, FIRST_PAUSE, limits_for(most=13))[-1] == 13


def test_an_idle_gpu_with_less_room_than_it_said() -> None:
    bench = Bench()
    bench.mover.gpu_has_room_for = 8
    seen = run_idle(bench, 60, PLENTY)
    assert max(seen) == 8
    assert seen[-1] == 7
    assert len(bench.controller.decisions) == 3


def test_samples_after_all_are_solved_for() -> None:
    bench = Bench()
    run_idle(bench, 40, PLENTY)
    assert bench.here == L
    bench.run(FAST, 40)
    assert bench.here == best(FAST)


def test_no_room_on_the_gpu(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.mover.gpu_has_room_for = 8
    with caplog.at_level(logging.WARNING):
        bench.run(SLOW, 10)
    # It came to eight, and goes back by one: the next forward needs some room as well.
    assert bench.here == 7
    decision = bench.controller.decisions[-1]
    assert decision.gpu_layers_target == 7
    assert "the GPU had no memory for the state of layer 'layer 8'" in decision.reason
    assert "had no memory" in caplog.text
    refused_at = decision.step
    # Nothing above is tried for 100 steps, whatever the solver would like.
    seen = bench.run(SLOW, refused_at + FIRST_PAUSE - 1 - bench.step)
    assert set(seen) == {7}
    assert len(bench.controller.decisions) == 3
    # Then it is: in vain, or not; the second time it waits for twice as long.
    seen = bench.run(SLOW, 20)
    assert max(seen) == 8
    assert seen[-1] == 7
    assert "had no memory" in bench.controller.decisions[-1].reason
    bench.mover.gpu_has_room_for = L
    assert set(bench.run(SLOW, FIRST_PAUSE)) == {7}
    bench.run(SLOW, FIRST_PAUSE + 20)
    assert bench.here == best(SLOW)


def test_a_changed_load_moves_fewer_layers_below_the_bound() -> None:
    bench = Bench()
    bench.mover.gpu_has_room_for = 8
    bench.run(SLOW, 20)
    assert bench.here == 7
    bench.run(FAST, 20)
    assert bench.here == best(FAST)


@pytest.mark.parametrize("room", [0, 1])
def test_no_room_for_even_one_layer(room: int) -> None:
    bench = Bench()
    bench.mover.gpu_has_room_for = room
    assert set(bench.run(SLOW, 100)) <= {0, 1}
    assert bench.here == 0


def test_no_step_back_below_what_the_host_can_hold() -> None:
    bench = Bench(begin=8)
    bench.mover.gpu_has_room_for = 8
    limits = limits_for(fewest=8)
    bench.run(SLOW, 50, limits)
    assert bench.here == 8
    assert bench.mover.log == []
    assert "had no memory" in bench.controller.decisions[-1].reason


def test_layers_leave_the_gpu_as_far_as_the_host_holds_them_now() -> None:
    """However much it held when k was decided last."""
    bench = Bench()
    bench.run(SLOW, 20, limits_for(fewest=best(SLOW)))  # short
    here = bench.here
    assert here == best(SLOW)
    assert bench.controller.retreat(bench.step, limits_for(fewest=here - 1))
    assert bench.here == here - 1
    assert not bench.controller.retreat(bench.step, limits_for(fewest=here))
    assert bench.controller.retreat(bench.step, limits_for())
    assert bench.here == here - 1 - STEP_MOVES


def test_both_sides_full(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(begin=6)
    full = limits_for(most=5, fewest=8)
    with caplog.at_level(logging.WARNING):
        bench.run(SLOW, 10, full)
        bench.run(FAST, 10, full)
    assert bench.here == 6
    assert bench.mover.log == []
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    text = warnings[0].getMessage()
    assert "at least 8 layers on the GPU, the GPU has memory for 5; training goes on with 6" in text
    bench.run(FAST, 12)  # memory comes back
    assert bench.here == best(FAST)


def test_no_room_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(begin=14)
    bench.mover.host_has_room_for = L - 9
    with caplog.at_level(logging.WARNING):
        bench.run(FAST, 12)
    assert bench.here == 9  # the placement stays, training goes on
    decision = bench.controller.decisions[-1]
    assert (decision.gpu_layers_before, decision.gpu_layers_target) == (9, 9)
    assert "the host had no memory for the state of layer 'layer 8'" in decision.reason
    assert "cannot be mapped" in decision.reason
    assert "had no memory" in caplog.text
    refused_at = decision.step
    seen = bench.run(FAST, refused_at + FIRST_PAUSE - 1 - bench.step)
    assert set(seen) == {9}
    assert len(bench.controller.decisions) == 3
    bench.run(SLOW, 20)  # the other way is open
    assert bench.here == best(SLOW)
    bench.mover.host_has_room_for = L
    bench.run(FAST, 130)  # the way back is open later: layers left the GPU once, and came back
    assert bench.here == best(FAST)


def test_a_resumed_run_may_leave_the_gpu_at_once() -> None:
    bench = Bench(begin=14)
    for costs, steps in ((FAST, 30), (SLOW, 30), (FAST, 30)):
        bench.run(costs, steps)
    assert bench.here == best(SLOW)  # layers that left it came back: the next ones wait
    bench.step = 0
    bench.controller.resume(0, [])
    bench.run(FAST, 40)
    assert bench.here == best(FAST)


def test_no_room_on_either_side() -> None:
    bench = Bench(begin=9)
    bench.mover.gpu_has_room_for, bench.mover.host_has_room_for = 9, L - 9
    for number in range(30):
        bench.run(SLOW if number % 2 else FAST, 7)
        assert bench.here == 9
    assert bench.controller.moves.is_settled


def test_all_at_once_stops_where_there_is_no_room() -> None:
    bench = Bench(begin=3, solves=False)
    bench.mover.gpu_has_room_for, bench.mover.host_has_room_for = 12, L - 2
    bench.controller.decide(1, L, "by hand")
    bench.controller.apply_moves(1, at_once=True)
    assert bench.here == 12
    bench.controller.apply_moves(2)
    assert bench.here == 11
    bench.controller.decide(3, 0, "by hand")
    bench.controller.apply_moves(3, at_once=True)
    assert bench.here == 2
    bench.controller.apply_moves(4)
    assert bench.here == 2
    assert bench.controller.moves.target == 2


# -- split master weights: those of some layers on the CPU are whole ------------------------------


def room_for_whole(number: int, *, on_gpu: int = 0, most: int = L) -> MemoryLimits:
    """So many layers on the CPU may be whole, beside the others, with ``on_gpu`` on the GPU."""
    host = (L - on_gpu) * (10 + 2) * SIZE + number * 2 * SIZE
    return MemoryLimits(
        gpu=most * (10 + 2) * SIZE, gpu_reserve=0, gpu_base=0, host=host, host_reserve=0
    )


def whole(bench: Bench) -> list[int]:
    """The layers on the CPU whose master weights are whole."""
    return [x.index for x in bench.layers if x.placement == "cpu" and x.form.host_master == "fp32"]


def test_as_few_layers_are_late_as_memory_asks_for() -> None:
    bench = Bench(master="split")
    target = bench.run(SLOW, 30, room_for_whole(3))[-1]
    assert target == best(SLOW)
    # What has gone to the GPU has left room for six whole ones each.
    assert whole(bench) == list(range(target, L))
    decision = bench.controller.decisions[-1]
    assert decision.host_master_reason.endswith("are whole, and updates there previewed")
    # Those that come back are in the way of the others, which are split first.
    bench.mover.log.clear()
    bench.run(FAST, 30, room_for_whole(3))
    number = bench.here
    split = L - number - 3 - 6 * number
    assert len(whole(bench)) == L - number - max(0, split)
    assert whole(bench) == list(range(number, number + len(whole(bench))))
    decision = bench.controller.decisions[-1]
    assert f"the last {split} of {L - number} layers on the CPU are split" in (
        decision.host_master_reason
    )
    assert decision.costs is not None
    assert decision.costs.first_late(number) == L - split
    moved = [index for place, index in bench.mover.log if place == "cpu" and index >= target]
    assert moved == list(range(target, L))


def test_whole_master_weights_leave_room_for_a_save() -> None:
    bench = Bench(master="split", save_bytes=3 * 2 * SIZE)
    bench.run(FAST, 8, room_for_whole(10))
    assert whole(bench) == list(range(7))


def test_moves_for_the_form_are_few_a_step_and_settle() -> None:
    bench = Bench(10, master="split")
    bench.controller.solves = False
    bench.controller.decide(0, 10, "", limits=room_for_whole(10, on_gpu=10))
    seen: list[int] = []
    while bench.controller.moves.is_moving:
        assert not bench.controller.moves.is_settled
        bench.controller.apply_moves(bench.step)
        seen.append(len(whole(bench)))
    assert seen == [STEP_MOVES, 2 * STEP_MOVES, 3 * STEP_MOVES, 10]
    assert bench.here == 10
    assert bench.mover.log == [(p, i) for i in range(10, L) for p in ("gpu", "cpu")]


@pytest.mark.parametrize(("room", "expected"), [(9, 9), (8, 8), (11, 10), (12, 12)])
def test_the_host_has_other_room_than_before(room: int, expected: int) -> None:
    """Less of it makes a layer late; more of it counts from a tenth of the layers on."""
    bench = Bench(master="split")
    bench.run(FAST, 8, room_for_whole(10))
    assert bench.here == 0
    assert whole(bench) == list(range(10))
    bench.run(FAST, 8, room_for_whole(room))
    assert whole(bench) == list(range(expected))


def test_the_gpu_has_no_memory_for_a_change_of_form(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(4, master="split")
    bench.controller.solves = False
    bench.mover.gpu_has_room_for = 4
    bench.controller.decide(0, 4, "", limits=room_for_whole(6, on_gpu=4))
    bench.controller.apply_moves(1)
    assert whole(bench) == []
    assert not bench.controller.moves.is_moving
    assert bench.here == 4
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "the GPU had no memory for the state of layer 'layer 4'" in message
    assert f"stay as they are until step {1 + FIRST_PAUSE}" in message
    assert [one.host_master for one in bench.controller.layer_bytes[4:]] == [None] * (L - 4)
    # Then it is tried again.
    bench.mover.gpu_has_room_for = L
    bench.controller.solves = True
    bench.step = 1
    enough = room_for_whole(6, on_gpu=4, most=4)
    of = costs(0.5)
    assert bench.run(of, FIRST_PAUSE - 1, enough)[-1] == 4
    assert whole(bench) == []
    bench.run(of, 8, enough)
    assert whole(bench) == list(range(4, 10))


def test_the_host_has_no_memory_for_a_whole_form(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(4, master="split")
    bench.controller.solves = False
    to_cpu = bench.mover.to_cpu

    def refused(layer: Any) -> None:
        if layer.index == 6 and layer.form.host_master is not None:
            raise MemoryError("host memory for 1.00 GiB cannot be mapped")
        to_cpu(layer)

    bench.mover.to_cpu = refused  # pyright: ignore[reportAttributeAccessIssue]
    bench.controller.decide(0, 4, "", limits=room_for_whole(6, on_gpu=4))
    bench.controller.apply_moves(1, at_once=True)
    assert whole(bench) == [4, 5]
    assert bench.here == 4
    assert not bench.controller.moves.is_moving
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert (
        "the host had no memory for the state of layer 'layer 6' (host memory for 1.00 GiB"
        in message
    )
    forms = [one.host_master for one in bench.controller.layer_bytes[4:]]
    assert forms == ["fp32"] * 2 + [None] * (L - 6)


def test_a_host_that_refuses_a_layer_changes_no_forms() -> None:
    bench = Bench(10, master="split")
    bench.controller.solves = False
    bench.controller.decide(0, 10, "", limits=room_for_whole(4, on_gpu=10))
    bench.controller.apply_moves(1, at_once=True)
    assert whole(bench) == list(range(10, 14))
    bench.mover.host_has_room_for = 10
    bench.controller.decide(1, 9, "", limits=room_for_whole(5, on_gpu=9))
    bench.controller.apply_moves(2, at_once=True)
    assert bench.here == 10
    assert not bench.controller.moves.is_moving
    assert whole(bench) == list(range(10, 14))
    assert "stays on the GPU" in bench.controller.decisions[-1].reason
