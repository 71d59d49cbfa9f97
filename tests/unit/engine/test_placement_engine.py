"""k solved while an engine trains: layers move, room runs out, and no number changes."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.covering import everyday
from support.engines import built, environment, make_config
from support.models import Mlp, make_model
from support.processes import num_threads
from support.shadow import Shadow
from training import backward, inputs

from hytrain.kernels import host_memory
from hytrain.offload import cpu_updater
from hytrain.offload import mover as mover_module
from hytrain.offload import pinned as pinned_module
from hytrain.placement import backoff, controller, moves, solve_schedule

pytestmark = pytest.mark.timeout(120)

SOLVE: Any = "solve"


def free_solver(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Decides at random, as soon as it may."""
    rng, solve = random.Random(seed), controller.solve

    def at_random(costs: Any, method: Any, bounds: Any, **rest: Any) -> Any:
        found = solve(costs, method, bounds, **rest)
        return replace(found, gpu_layers=rng.randint(bounds.min_gpu_layers, bounds.max_gpu_layers))

    monkeypatch.setattr(controller, "solve", at_random)
    monkeypatch.setattr(controller, "worth_moving", lambda *_rest, **_more: True)
    monkeypatch.setattr(moves, "SETTLED_STEPS", 0)
    monkeypatch.setattr(solve_schedule, "CONFIRMING", 1)


def number_of_moves(engine: Any) -> Callable[[], int]:
    """Counts the moves of an engine from here on."""
    mover, counted = engine.optimizer.pipeline.mover, [0]

    def counting(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def move(layer: Any) -> None:
            original(layer)
            counted[0] += 1

        return move

    mover.to_gpu, mover.to_cpu = counting(mover.to_gpu), counting(mover.to_cpu)
    return lambda: counted[0]


def gpu_layers(engine: Any) -> int:
    """How many; always the first ones."""
    places = [state.placement for state in engine.optimizer.layer_states]
    number = places.count("gpu")
    assert places == ["gpu"] * number + ["cpu"] * (len(places) - number)
    return number


# -- a solver that is free to move ---------------------------------------------------------------


@pytest.mark.cpu  # steps as short as these are launch-bound on a GPU: it soon has all layers
@pytest.mark.parametrize(
    ("method", "clipping", "checks", "delays"),
    [
        ("pipeline", 0.02, True, ""),
        ("pipeline", 100.0, True, "5:300"),
        ("closed_form", 0.02, True, "5:300"),
        ("pipeline", 0.0, False, "5:300"),  # committed at once: nothing is pending
    ],
)
def test_a_solver_that_moves_all_the_time(
    monkeypatch: pytest.MonkeyPatch, method: str, clipping: float, checks: bool, delays: str
) -> None:
    free_solver(monkeypatch, 1)
    config = make_config(
        gpu_fraction=SOLVE, clipping=clipping, hytrain={"solver": {"method": method}}
    )
    config["bf16"]["check_grad_overflow"] = checks
    with environment("HYTRAIN_DELAYS", delays), built(make_model("mlp"), config) as engine:
        shadow, moves = Shadow(engine), number_of_moves(engine)
        for number in range(40):
            backward(engine, number)
            shadow.step()
            gpu_layers(engine)
            if number % 10 == 9:
                shadow.check()
        assert moves() > 20
        shadow.check()
        # What it decided is on record: who looks for more asks from where he was.
        decisions = engine.placement_decisions()
        assert len(decisions) > 5
        assert engine.placement_decisions(since=3) == decisions[3:]
        assert decisions[0].step == 0
        for before, after in pairwise(decisions[1:]):
            assert before.gpu_layers_target == after.gpu_layers_before
            assert before.step < after.step
        assert decisions[-1].costs is not None
        assert all(layer.forward > 0.0 for layer in decisions[-1].costs.layers)


@pytest.mark.cpu
def test_evaluations_skips_and_state_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    free_solver(monkeypatch, 3)
    model = make_model("mlp")
    poison = [False]
    model.get_parameter("embed.weight").register_hook(
        lambda g: g.fill_(float("inf")) if poison[0] else g
    )
    config = make_config(gpu_fraction=SOLVE, clipping=0.02)
    with environment("HYTRAIN_DELAYS", "4:300"), built(model, config) as engine:
        shadow, moves = Shadow(engine), number_of_moves(engine)
        for number in range(40):
            poison[0] = number % 7 == 3
            backward(engine, number)
            if number % 5 == 1:
                with torch.no_grad():
                    engine(**inputs(99))  # withdraws
            assert shadow.step() is poison[0]
            if number % 5 == 2:
                engine.eval()
                with torch.no_grad():
                    engine(**inputs(98))
                engine.train()
            if number % 5 == 3:
                state = engine.fp32_state_dict()  # in the middle of a move, as often as not
                embed = shadow.shards[0]
                (layout,) = (s.layout for s in shadow.states if s.index == 0)
                for slot in layout.slots:
                    part = slice(slot.offset, slot.offset + slot.numel)
                    for kind, flat in (("fp32", embed.p), ("exp_avg", embed.m)):
                        assert torch.equal(state[slot.name][kind].flatten(), flat[part])
        assert moves() > 10
        shadow.check()


def test_the_real_solver_trains_and_says_why() -> None:
    """Whatever it finds best for a toy: decisions are sound, and the run is the serial one."""
    config = make_config(gpu_fraction=SOLVE, bf16=False)
    with built(Mlp(num_blocks=4, width=128), config) as engine:
        shadow = Shadow(engine)
        batch = {"inputs": torch.randn(8, 128)}
        for _ in range(30):
            engine.backward(engine(**batch))
            shadow.step()
        shadow.check()
        decisions = engine.placement_decisions()
        assert decisions[0].reason.startswith("before the first step")
        assert decisions[-1].gpu_layers_target == engine.optimizer.placement.controller.moves.target
        costs = engine.optimizer.placement.costs()
        assert costs is not None
        assert costs.backward_seconds > 0.0
        assert costs.cpu_seconds > 0.0


# -- no memory ---------------------------------------------------------------------------------


class ScarceTorch:
    """torch for the mover, whose ``empty`` is another one."""

    def __init__(self, empty: Callable[..., torch.Tensor]) -> None:
        self.empty = empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.cpu
@everyday({"where": ("GPU", "host"), "delays": ("6:300", "")}, pairs=False)
def test_no_room_at_random_moves(monkeypatch: pytest.MonkeyPatch, where: str, delays: str) -> None:
    free_solver(monkeypatch, 4)
    monkeypatch.setattr(backoff, "FIRST_PAUSE", 3)
    monkeypatch.setattr(backoff, "_LONGEST_PAUSE", 3)
    refused: set[int] = set()  # steps
    number = 0

    def scarce(take: Callable[..., torch.Tensor], error: Exception) -> Callable[..., torch.Tensor]:
        def take_or_not(*arguments: Any, **keywords: Any) -> torch.Tensor:
            # Of a whole step: where gradients are in flight it is tried again without them.
            if random.Random(number).random() < 0.3:
                refused.add(number)
                raise error
            return take(*arguments, **keywords)

        return take_or_not

    if where == "GPU":
        empty = scarce(torch.empty, torch.OutOfMemoryError("Tried to allocate 1.00 GiB"))
        monkeypatch.setattr(mover_module, "torch", ScarceTorch(empty))
    else:
        host_zeros = scarce(mover_module.host_zeros, MemoryError("host memory cannot be mapped"))
        monkeypatch.setattr(mover_module, "host_zeros", host_zeros)
    config = make_config(gpu_fraction=SOLVE, clipping=0.02)
    with environment("HYTRAIN_DELAYS", delays), built(make_model("mlp"), config) as engine:
        shadow, moves = Shadow(engine), number_of_moves(engine)
        for number in range(60):
            backward(engine, number)
            shadow.step()
            gpu_layers(engine)
        assert len(refused) >= 5
        assert moves() > 20
        shadow.check()
        reasons = [decision.reason for decision in engine.placement_decisions()]
        assert sum(f"the {where} had no memory" in reason for reason in reasons) == len(refused)


def test_gradients_in_flight_make_room_for_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    free_solver(monkeypatch, 4)
    refused: list[int] = []
    with environment("HYTRAIN_DELAYS", "3:3000"):  # the worker is behind
        config = make_config(gpu_fraction=SOLVE, clipping=0.02)
        with built(make_model("mlp"), config) as engine:
            cpu = engine.optimizer.pipeline.cpu

            def empty(*arguments: Any, **keywords: Any) -> torch.Tensor:
                if cpu.unfetched:
                    refused.append(len(cpu.unfetched))
                    raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")
                return torch.empty(*arguments, **keywords)

            monkeypatch.setattr(mover_module, "torch", ScarceTorch(empty))
            shadow, moves = Shadow(engine), number_of_moves(engine)
            for number in range(40):
                backward(engine, number)
                shadow.step()
                gpu_layers(engine)
            assert refused
            assert moves() > 10
            shadow.check()
            reasons = [decision.reason for decision in engine.placement_decisions()]
            assert not any("had no memory" in reason for reason in reasons)


# -- nothing is left ---------------------------------------------------------------------------


class Recorder:
    """Follows what a function returns, without keeping it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._made: list[weakref.ref[Any]] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        made = self._function(*arguments, **keywords)
        self._made.append(weakref.ref(made))
        return made

    @property
    def total(self) -> int:
        return len(self._made)

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self._made)


def test_many_moves_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with built(make_model("mlp"), make_config()) as engine:
        backward(engine, 0)  # threads that torch keeps are there from here on
        engine.step()
    threads = num_threads()
    on_host, on_device = Recorder(host_memory.map_anonymous), Recorder(torch.empty)
    monkeypatch.setattr(host_memory, "map_anonymous", on_host)
    monkeypatch.setattr(mover_module, "torch", ScarceTorch(on_device))
    with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
        optimizer = engine.optimizer
        pinned, mover = optimizer.pipeline.cpu.pinned, optimizer.pipeline.mover
        num_layers = len(optimizer.layer_states)
        sizes: list[int] = []
        for number in range(40):
            backward(engine, number)
            engine.step()
            fraction = (0.0, 1.0, 0.5)[number % 3]
            engine.set_gpu_fraction(fraction)
            sizes.append(pinned.num_bytes)
            engine.synchronize()
            mover.release()
            assert mover._moves == []
            assert on_device.alive == (round(fraction * num_layers) if number else 0)
            assert on_host.alive == num_layers - round(fraction * num_layers)
        assert on_device.total > 60
        assert on_host.total > 60
        # Everything was on the host after the first move: no more was needed since.
        assert len(set(sizes)) == 1
        arenas = pinned._arenas
    assert (on_device.alive, on_host.alive) == (0, 0)
    assert num_threads() == threads
    assert all(arena._mapping is None for arena in arenas)


@pytest.mark.parametrize("delays", [pytest.param("", marks=pytest.mark.parity_full), "7:300"])
def test_pinned_memory_of_layers_that_have_left_is_given_back(
    monkeypatch: pytest.MonkeyPatch, delays: str
) -> None:
    """While it is being given back, layers come and go, and no number changes."""
    free_solver(monkeypatch, 8)
    monkeypatch.setattr(pinned_module, "_ARENA_BYTES", 1)  # a slot each
    monkeypatch.setattr(cpu_updater, "SHRINK_STEPS", 8)
    monkeypatch.setattr(cpu_updater, "RELEASE_STEPS", 2)
    config = make_config(gpu_fraction=0.0, clipping=0.02)
    with environment("HYTRAIN_DELAYS", delays), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        pinned = engine.optimizer.pipeline.cpu.pinned

        def steps(count: int) -> int:
            for _ in range(count):
                backward(engine, engine.global_steps)
                shadow.step()
            return pinned.num_bytes

        def settled() -> int:
            steps(cpu_updater.SHRINK_STEPS)
            while pinned.is_retiring:
                steps(1)
            return pinned.num_bytes

        all_on_host = steps(cpu_updater.SHRINK_STEPS + 1)
        engine.set_gpu_fraction(0.5)
        assert steps(cpu_updater.SHRINK_STEPS - 2) == all_on_host  # they might come back
        half = settled()
        assert engine.memory_peaks()["step"].pinned <= half < all_on_host
        engine.set_gpu_fraction(1.0)
        assert settled() < half
        engine.set_gpu_fraction(0.5)
        assert settled() == half
        monkeypatch.setattr(cpu_updater, "SHRINK_STEPS", 1)
        engine.set_gpu_fraction(SOLVE)
        steps(40)
        engine.set_gpu_fraction(0.5)
        assert settled() == half
        shadow.check()


def test_layers_that_stay_on_the_device_pin_nothing() -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
        pinned = engine.optimizer.pipeline.cpu.pinned
        empty, sizes = pinned.num_bytes, []
        for number, fraction in enumerate([1.0, 0.8, 0.8, 0.5, 0.8, 0.5, 0.0, 1.0, 0.0]):
            backward(engine, number)
            engine.step()
            engine.set_gpu_fraction(fraction)
            sizes.append(pinned.num_bytes)
        assert sizes[0] == empty < sizes[1] == sizes[2] < sizes[3] == sizes[4] == sizes[5]
        assert sizes[5] < sizes[6] == sizes[7] == sizes[8]
