"""What a profile measures of updates' launches is what a step of training makes of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from torch import nn

import hytrain
from hytrain.formats.profile_file import UpdateLaunches
from hytrain.kernels.clipping import GradientNorm
from hytrain.kernels.grouped_adam import GroupedAdam
from hytrain.offload.cpu_updater import CpuUpdater
from hytrain.placement.cost_estimator import CostEstimator
from hytrain.placement.manager import PlacementManager
from hytrain.tools.planner.cluster import UpdateLaunchTimes
from hytrain.tools.planner.launching import UpdateLaunchSeconds
from hytrain.tools.planner.problem import Model
from hytrain.tools.profiler import update_launches
from hytrain.tools.profiler.update_launches import (
    CASES,
    UpdatedKind,
    UpdatedLayers,
    UpdateSteps,
    terms_of,
)

pytestmark = pytest.mark.timeout(60)

WIDTH, HEAD, STEPS = 64, 2048, 3
CPU = torch.device("cpu")
SENT, UPDATED, WAITED = "UpdatePipeline.send", "LayerUpdate.apply", "UpdatePipeline.wait"


class Deep(nn.Module):
    """Blocks of some matrices each, behind them a large one that is no block."""

    def __init__(self, blocks: int, matrices: int = 1) -> None:
        super().__init__()

        def block() -> nn.Module:
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(matrices)))

        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, HEAD, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().pow(2).mean()


@contextmanager
def counted() -> Generator[Counter[str]]:
    """Calls of what launches, and of all that updates are made of, each by its name."""
    found: Counter[str] = Counter()
    root = Path(hytrain.__path__[0])
    folders = tuple(str(root / name) for name in ("offload", "kernels", "model/layer_"))

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)


def of_training(blocks: int, fraction: float, matrices: int = 1) -> Counter[str]:
    """Calls of some steps of an engine in which nothing is measured."""

    def step(engine: Any) -> None:
        engine.backward(engine(torch.ones(1, WIDTH)))
        engine.step()

    config = make_config(gpu_fraction=fraction, clipping=1.0)
    with built(Deep(blocks, matrices), config) as engine:
        assert len(engine.optimizer.layer_states) == blocks + 1
        for _ in range(2):
            step(engine)
        engine.optimizer.pipeline.cpu.wait_all()
        with counted() as found:
            for _ in range(STEPS):
                step(engine)
                engine.optimizer.pipeline.cpu.wait_all()
    return found


def of_profile(on_gpu: int, on_cpu: int, sums_squares: bool) -> Counter[str]:
    steps = UpdateSteps(
        UpdatedLayers(on_gpu, on_cpu), CPU, UpdatedKind(torch.bfloat16, sums_squares=sums_squares)
    )
    for _ in range(2):
        steps.step()
    with counted() as found:
        for _ in range(STEPS):
            steps.step()
    steps.close()
    return found


@pytest.fixture
def _in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launch-bound, and none is measured."""
    monkeypatch.setattr(CostEstimator, "launch_bound", True)
    monkeypatch.setattr(PlacementManager, "_measures_next", lambda _: False)


COUNTED = (
    SENT,
    UPDATED,
    WAITED,
    "GradientNorm.measure",
    "GradientNorm.add_up",
    "GradientNorm.launch_decision",
    "GroupedAdam.begin_step",
    "GroupedAdam.launch",
    "DeviceUpdate.run",
    "DeviceUpdate._queued",
    "Streams.used_on_update",
    "Streams.record_compute",
    "Streams.compute_waits_for_update",
    "CpuUpdater.send",
    "CpuUpdater.wait_weights",
)


@pytest.mark.usefixtures("_in_line", "process_group")
@pytest.mark.parametrize("matrices", [1, 2], ids=["with squares", "together"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_a_layer_of_a_profiled_step_launches_what_one_of_a_training_step_does(
    fraction: float, matrices: int
) -> None:
    """The head, a layer of one parameter, is the same in both models."""
    few, many = 5, 13

    def a_block(calls: Callable[[int], Counter[str]]) -> dict[str, int]:
        less, more = calls(few), calls(many)
        return {name: more[name] - less[name] for name in COUNTED}

    def profiled(blocks: int) -> Counter[str]:
        on_gpu = round(fraction * (blocks + 1))
        return of_profile(on_gpu, blocks + 1 - on_gpu, matrices == 1)

    trained = a_block(lambda blocks: of_training(blocks, fraction, matrices))
    assert trained == a_block(profiled)
    assert trained[SENT] == STEPS * (many - few)
    assert trained[UPDATED] == fraction * STEPS * (many - few)
    if matrices == 1:  # then all layers of the model are of one kind
        found = of_training(few, fraction)
        assert {name: found[name] for name in COUNTED} == {
            name: profiled(few)[name] for name in COUNTED
        }


@pytest.mark.usefixtures("_in_line", "process_group")
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_plan_counts_the_launches_of_a_training_step(fraction: float) -> None:
    """And the layers on either side, as it counts for equal layers and what is outside."""
    blocks = 17
    parameters = blocks * WIDTH**2 + WIDTH * HEAD
    model = Model("m", blocks, parameters, outside=(0, WIDTH * HEAD))
    k = round(fraction * blocks)
    found = of_training(blocks, k / blocks)  # as training is told of a plan's choice

    def seconds(**one: float) -> UpdateLaunchSeconds:
        return UpdateLaunchSeconds.of(UpdateLaunchTimes(**one), model, 1.0)

    def each_step(name: str) -> float:
        return found[name] / STEPS

    assert 1e3 * seconds(launch_ms=1.0).on_gpu[k] == pytest.approx(each_step("GroupedAdam.launch"))
    assert 1e3 * seconds(gpu_layer_ms=1.0).on_gpu[k] == pytest.approx(each_step(UPDATED))
    assert 1e3 * seconds(cpu_layer_ms=1.0).on_cpu[k] == pytest.approx(each_step("CpuUpdater.send"))
    assert 1e3 * seconds(gpu_step_ms=1.0).on_gpu[k] == pytest.approx(each_step("DeviceUpdate.run"))


TERMS = UpdateLaunches(gpu_step_ms=0.3, launch_ms=0.05, gpu_layer_ms=0.02, cpu_layer_ms=0.1)


def _seconds(launches: list[int]) -> list[float]:
    return [
        2e-3 + 3e-4 * (case.on_gpu > 0) + 5e-5 * number + 2e-5 * case.on_gpu + 1e-4 * case.on_cpu
        for case, number in zip(CASES, launches, strict=True)
    ]


def test_terms_are_told_apart() -> None:
    launches = [0, 0, 2, 4, 16]
    found = terms_of(_seconds(launches), launches)
    for name, value in TERMS.model_dump().items():
        assert getattr(found, name) == pytest.approx(value)


def test_where_each_layer_has_a_launch_of_its_own_their_sum_is_known() -> None:
    launches = [case.on_gpu for case in CASES]
    found = terms_of(_seconds(launches), launches)
    assert found.launch_ms + found.gpu_layer_ms == pytest.approx(0.07)
    assert found.cpu_layer_ms == pytest.approx(0.1)


_clock = SimpleNamespace(now=0.0)


def _slow(function: Callable[..., Any], calls: Callable[..., int]) -> Callable[..., Any]:
    """Takes a millisecond of a clock for each call more."""

    def slowed(*arguments: Any, **named: Any) -> Any:
        _clock.now += 1e-3 * calls(*arguments)
        return function(*arguments, **named)

    return slowed


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_what_is_measured_is_where_it_is_spent(
    moments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that nothing moves but what is slowed down."""
    _clock.now = 0.0
    monkeypatch.setattr(update_launches.time, "perf_counter", lambda: _clock.now)
    slow = (
        (GroupedAdam, "launch", lambda *_: 10),
        (GradientNorm, "launch_decision", lambda *_: 7),
        (GradientNorm, "measure", lambda _self, layers, _gradients: 2 + len(layers)),
        (CpuUpdater, "send", lambda *_: 5),
    )
    for owner, name, calls in slow:
        monkeypatch.setattr(owner, name, _slow(getattr(owner, name), calls))
    found = update_launches.measured_launches(CPU, UpdatedKind(torch.bfloat16, moments))
    # A CPU-placed layer's norm is taken by itself, those of all others together.
    assert found.cpu_layer_ms == pytest.approx(5 + 3, abs=1e-6)
    assert found.gpu_step_ms == pytest.approx(2, abs=1e-6)
    if moments == "fp32":
        assert found.launch_ms == pytest.approx(10, abs=1e-6)
        assert found.gpu_layer_ms == pytest.approx(1, abs=1e-6)
    else:
        assert found.launch_ms + found.gpu_layer_ms == pytest.approx(1, abs=1e-6)


def test_without_a_gpu_there_is_nothing_to_launch() -> None:
    assert update_launches.update_launches(CPU, UpdatedKind(torch.bfloat16)) is None
