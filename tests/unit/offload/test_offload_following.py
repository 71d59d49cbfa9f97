"""A change of batch or of the host's load is followed within 20 steps.

The real manager, controller and estimator on a simulated machine: the walk that predicts a step is
taken for the truth, its times reach the timer's marks and the worker's spans with some noise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from hytrain import _C
from hytrain.config import SolverConfig
from hytrain.cost.prediction import predict
from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.hardware.host_share import HostShare
from hytrain.model.state_format import StateFormat
from hytrain.offload.threads import ThreadChoice
from hytrain.placement import memory_probe
from hytrain.placement.choose_gpu_layers import solve
from hytrain.placement.controller import PlacementController
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.manager import PlacementManager
from hytrain.placement.measure import CostEstimator, InitialRates
from hytrain.placement.memory import Bounds
from hytrain.placement.records import Decision

SIZES = (98_000_000, *[113_000_000] * 24, 98_000_000)
L = len(SIZES)
GIB = 1 << 30
WITHIN = 20


@dataclass
class Machine:
    """What the steps take now; the model of docs/internals.md."""

    batch: float = 1.0
    host: float = 1.0
    """Times that the worker's passes take longer."""
    clipped: bool = False
    noise: float = 0.003

    def costs(self) -> StepCosts:
        total = sum(SIZES)
        layers = [
            LayerCosts(
                name=f"layer {i}",
                parameters=n,
                forward=0.107 * self.batch * n / total,
                backward=0.216 * self.batch * n / total,
                to_host=2 * n / 55e9,
                cpu_update=0.60 * self.host * n / total,
                cpu_commit=0.52 * self.host * n / total,
                cpu_preview=0.32 * self.host * n / total,
                to_device=2 * n / 55e9,
                gpu_update=n / 150e9,
            )
            for i, n in enumerate(SIZES)
        ]
        share = 1.0 if self.clipped else 0.0
        return StepCosts(tuple(layers), between=0.002, tail=0.003, clipped_share=share)

    def best(self) -> int:
        return solve(self.costs(), "pipeline", Bounds(L, 0, L)).gpu_layers

    def loss(self, number: int) -> float:
        """How much longer than the best a step with so many GPU layers takes."""
        seconds = predict(self.costs()).step_seconds
        return seconds[number] / min(seconds) - 1.0


class Mover:
    """Moves a layer at once; the worker's next pass over one that came has nothing to commit."""

    def __init__(self) -> None:
        self.fresh: set[int] = set()
        self.left: list[int] = []
        self.bytes_leaving_device = 0

    def to_gpu(self, layer: Any) -> None:
        layer.placement = "gpu"
        self.left.append(layer.index)

    def to_cpu(self, layer: Any) -> None:
        layer.placement = "cpu"
        self.fresh.add(layer.index)

    def release(self) -> None:
        pass


class Simulation:
    """Steps of a training run on a machine, as the manager sees them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, method: Literal["pipeline", "closed_form"]
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(3)
        self.machine = Machine()
        self.mover = Mover()
        self.spans: list[Any] = []
        self.marked_steps: list[int] = []
        self.steps = 0
        monkeypatch.setattr(memory_probe, "host_memory_pools", lambda: {"machine": 500 * GIB})
        layers: Any = [
            SimpleNamespace(
                index=i,
                name=f"layer {i}",
                shard_size=n,
                placement="cpu",
                form=StateFormat(),
                state_bytes=12 * n,
            )
            for i, n in enumerate(SIZES)
        ]
        self.layers = layers
        layer_bytes = [LayerBytes(f"layer {i}", n) for i, n in enumerate(SIZES)]
        pipeline: Any = SimpleNamespace(
            layers=layers,
            streams=SimpleNamespace(device=torch.device("cpu")),
            observer=None,
            room=SimpleNamespace(
                is_watching=False, in_flight=0, kept=0, stop=lambda: None, end_backward=lambda: None
            ),
            mover=self.mover,
            waiting_on_device=0,
            cpu=SimpleNamespace(
                worker=SimpleNamespace(take_spans=self._take_spans),
                pinned=SimpleNamespace(num_bytes=0),
            ),
        )
        first = Decision(
            step=0,
            gpu_layers_before=0,
            gpu_layers_target=0,
            num_layers=L,
            reason="",
            bounds=Bounds(L, 0, L),
            layer_bytes=tuple(layer_bytes),
            limits=MemoryLimits(None, 0, 0, 500 * GIB, 0),
        )
        mover: Any = self.mover
        solver = SolverConfig(
            method=method, gpu_memory_reserve_bytes=0, host_memory_reserve_bytes=0
        )
        self.controller = PlacementController(layers, mover, solver, first, solves=True)
        estimator = CostEstimator(
            layer_bytes, 16 << 20, InitialRates(1 / 4e9, 1 / 120e9), updates_overlap=False
        )
        self.manager = PlacementManager(
            pipeline,
            self.controller,
            estimator,
            solver,
            HostShare(1, 1, {}),
            lambda _: pytest.fail("asked"),
            ThreadChoice(1, 1 / 4e9),
        )
        clock: Any = SimpleNamespace(
            mark=self._mark,
            is_past=lambda _mark: True,
            seconds=lambda begin, end: end - begin,
            release=lambda _mark: None,
        )
        self.manager.timer._clock = clock

    @property
    def here(self) -> int:
        return self.controller.num_gpu_layers

    def _mark(self) -> float:
        if not self.marked_steps or self.marked_steps[-1] != self.steps:
            self.marked_steps.append(self.steps)
        return self.now

    def _take_spans(self) -> list[Any]:
        taken, self.spans = self.spans, []
        return taken

    def _noisy(self, seconds: float) -> float:
        return seconds * (1.0 + self.rng.uniform(-1.0, 1.0) * self.machine.noise)

    def _job(self, layer: int, job_pass: _C.Pass, seconds: float, *, committed: bool) -> None:
        length = round(self._noisy(seconds) * 1e9)
        self.spans.append(
            SimpleNamespace(
                layer=layer,
                job_pass=job_pass,
                begin_ns=0,
                end_ns=length,
                wait_gradient_ns=0,
                committed=committed,
            )
        )

    def _work(self, costs: StepCosts) -> None:
        """The worker's jobs of one step."""
        clipped = self.machine.clipped
        for index in self.mover.left:
            self._job(index, _C.Pass.leave, 1.0, committed=True)
        self.mover.left.clear()
        for index in reversed(range(self.here, L)):
            layer = costs.layers[index]
            is_fresh = index in self.mover.fresh
            seconds = layer.cpu_commit if clipped else layer.cpu_update
            seconds = layer.cpu_preview if is_fresh else seconds
            self._job(index, _C.Pass.update, seconds, committed=not is_fresh)
        self.mover.fresh.clear()
        for index in range(self.here, L) if clipped else ():
            self._job(index, _C.Pass.preview, costs.layers[index].cpu_preview, committed=True)

    def step(self) -> None:
        costs, timer = self.machine.costs(), self.manager.timer
        exposed = predict(costs, gpu_layers=[self.here]).candidates[0].exposed_seconds
        timer.begin_forward()
        if self.here < L:
            timer.wait_begins(self.here, on_cpu=True)
            self.now += self._noisy(exposed)
            timer.wait_ends(self.here)
        for index, layer in enumerate(costs.layers):
            timer.enter(index)
            self.now += self._noisy(layer.forward)
        timer.end_forward()
        self.now += costs.between
        self.manager.begin_backward()
        for index in reversed(range(L)):
            self.now += self._noisy(costs.layers[index].backward)
            self.manager.gradient(index)
        self._work(costs)
        self.manager.end_backward(self.steps + 1)
        timer.updates_begin()
        for index in range(self.here):
            self.now += self._noisy(costs.layers[index].gpu_update)
            timer.layers_updated({index: 1})
        self.now += costs.tail
        coefficient = 0.5 if self.machine.clipped else 1.0
        outcome: Any = SimpleNamespace(skip=False, coefficient=coefficient)
        statistics: Any = SimpleNamespace(
            to_host_ns=round(1e9 / 55), to_host_bytes=10**9, to_device_ns=0, to_device_bytes=0
        )
        self.manager.end_step(outcome, statistics)
        self.steps += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


@pytest.fixture(params=["pipeline", "closed_form"])
def simulation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch, request.param)


def settled(simulation: Simulation) -> Simulation:
    simulation.run(60)
    assert simulation.controller.moves.target == simulation.here
    return simulation


def assert_is_there(simulation: Simulation) -> None:
    """The layers are where the new truth wants them, as near as hysteresis asks for."""
    assert simulation.controller.moves.target == simulation.here
    if simulation.controller._solver.method == "pipeline":
        assert simulation.machine.loss(simulation.here) < 0.025
        # And no more memory than needed.
        assert simulation.here <= simulation.machine.best() + 3
    else:
        from hytrain.placement.choose_gpu_layers import closed_form

        costs = simulation.machine.costs()
        share = closed_form(costs.backward_seconds, costs.cpu_seconds, costs.alpha)
        assert abs(simulation.here - share * L) <= 1.0


def test_the_changes_here_are_changes() -> None:
    machine = Machine()
    assert 5 < machine.best() < 20
    for changed in (replace(machine, batch=2.0), replace(machine, host=2.0)):
        assert abs(changed.best() - machine.best()) >= 4
        assert changed.loss(machine.best()) > 0.05 or changed.best() < machine.best()


def test_the_first_placement_is_there_within_20_steps(simulation: Simulation) -> None:
    simulation.run(WITHIN)
    assert_is_there(simulation)


CHANGES = [
    {"batch": 2.0},
    {"batch": 0.5},
    {"host": 2.0},
    {"host": 1.3},
    {"host": 0.6},
    {"batch": 2.0, "host": 2.0},
    {"clipped": True},
]


@pytest.mark.parametrize(
    ("change", "offset"), [(change, n % 4) for n, change in enumerate(CHANGES)], ids=str
)
def test_a_change_is_followed(
    simulation: Simulation, change: dict[str, float], offset: int
) -> None:
    settled(simulation)
    simulation.run(offset)
    simulation.machine = replace(simulation.machine, **change)  # pyright: ignore[reportArgumentType]
    simulation.run(WITHIN)
    assert_is_there(simulation)


@pytest.mark.parametrize("change", [{"batch": 2.0}, {"host": 2.0}], ids=str)
def test_and_back_again(simulation: Simulation, change: dict[str, float]) -> None:
    before = settled(simulation).machine
    simulation.machine = replace(before, **change)  # pyright: ignore[reportArgumentType]
    simulation.run(40)
    simulation.machine = before
    simulation.run(WITHIN)
    assert_is_there(simulation)


def test_nothing_moves_while_nothing_changes(simulation: Simulation) -> None:
    settled(simulation)
    decisions = len(simulation.controller.decisions)
    simulation.run(300)
    assert len(simulation.controller.decisions) == decisions
    assert simulation.controller.decisions[-1].measured_seconds == pytest.approx(
        predict(simulation.machine.costs()).step_seconds[simulation.here], rel=0.02
    )


def marked(simulation: Simulation, steps: int) -> float:
    """Share of the next steps whose backward was measured."""
    backward: Sequence[int]
    begin = simulation.steps
    simulation.run(steps)
    backward = [s for s in simulation.marked_steps if s >= begin]
    return len(backward) / steps


def test_a_settled_run_is_measured_now_and_then(simulation: Simulation) -> None:
    settled(simulation)
    # A measured step's end is a mark in the next one.
    assert marked(simulation, 80) <= 0.5


def test_after_a_change_every_step_is_measured_for_a_while(simulation: Simulation) -> None:
    settled(simulation)
    simulation.machine = replace(simulation.machine, batch=1.2)
    simulation.run(6)
    assert marked(simulation, 5) == 1.0
    simulation.run(30)
    assert marked(simulation, 80) <= 0.5


def test_a_step_that_something_held_up_is_no_change(simulation: Simulation) -> None:
    usual = settled(simulation).machine
    share: list[float] = []
    for _ in range(12):
        # Until one of them is a step that is measured.
        simulation.machine = replace(usual, batch=1.5)
        simulation.run(1)
        simulation.machine = usual
        share.append(marked(simulation, 10))
    assert max(share) <= 0.8  # 1.0 if all that follow were measured


def test_steps_that_scatter_are_not_all_measured(simulation: Simulation) -> None:
    settled(simulation).controller.solves = False  # a move is a reason to measure
    rng, usual = random.Random(1), simulation.machine
    share: list[float] = []
    for _ in range(240):
        # As on a host whose launches bound the step.
        simulation.machine = replace(usual, batch=rng.uniform(0.88, 1.12))
        share.append(marked(simulation, 1))
    assert sum(share[80:]) / 160 <= 0.6


class CountingProbe:
    """Of a device with memory of its own, which never runs out."""

    wanted = True

    def __init__(self) -> None:
        self.begun = 0
        self.asked = 0
        self.gpu: int | None = None

    def begin_backward(self) -> None:
        self.begun += 1

    def gradient(self, index: int, waiting: int, in_flight: int) -> None:
        pass

    def end_step(self, gpu_layers: int, moving_bytes: int) -> None:
        pass

    def limits(self, *_arguments: Any) -> Any:
        self.asked += 1
        return MemoryLimits(self.gpu, GIB, 0, 500 * GIB, 0)

    def with_base(self, limits: Any) -> Any:
        return limits


def test_backward_is_held_to_what_the_plan_leaves_free(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less what a layer's backward takes for a moment and the reserve; where the host updates."""
    probe: Any = CountingProbe()
    probe.transient, probe.growth, probe.gpu = 3 * GIB, GIB, 24 * GIB
    simulation.manager._probe = simulation.manager._limits._probe = probe
    told: list[tuple[int, ...]] = []
    room = simulation.manager._pipeline.room
    monkeypatch.setattr(room, "begin_step", lambda *sizes: told.append(sizes), raising=False)
    simulation.run(1)
    assert told == [(24 * GIB, GIB, 3 * GIB, GIB)]
    for layer in simulation.layers:
        layer.placement = "gpu"
    simulation.manager.begin_backward()
    assert len(told) == 1
    # Where no gradient is planned to stay, the first backward asks whether all of them may.
    each = [replace(one, keeps_pending=False) for one in simulation.manager._bytes]
    simulation.manager._bytes = tuple(each)
    simulation.manager.begin_backward()
    assert len(told) == 2


def test_memory_is_followed_now_and_then_and_after_a_change(simulation: Simulation) -> None:
    probe: Any = CountingProbe()
    simulation.manager._probe = simulation.manager._limits._probe = probe
    simulation.run(3)
    assert probe.begun == 3
    settled(simulation)
    probe.begun = probe.asked = 0
    simulation.run(200)
    # Asking the allocator at every layer, or the host for its memory, takes a while.
    assert probe.begun <= 12
    assert probe.asked <= 32
    probe.begun = 0
    simulation.machine = replace(simulation.machine, batch=0.5)
    simulation.run(8)
    assert probe.begun >= 2


def test_launch_bound_steps_think_only_about_what_is_new(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU waits meanwhile. Memory is looked at now and then, also where nothing is measured."""
    settled(simulation)
    manager = simulation.manager
    asked: list[int] = []
    consider = manager.controller.consider

    def counted(*arguments: Any, **named: Any) -> None:
        asked.append(manager._schedule.steps)
        consider(*arguments, **named)

    monkeypatch.setattr(manager.controller, "consider", counted)
    monkeypatch.setattr(type(manager._estimator), "launch_bound", property(lambda _: True))
    simulation.run(40)
    assert len(asked) <= 24  # with a move, behind which all steps are measured; else every fourth
    monkeypatch.setattr(manager._schedule, "measures_next", lambda: False)
    simulation.run(10)
    asked.clear()
    simulation.run(40)
    assert 3 <= len(asked) <= 4
