"""What a profile measures of training's launches is what an engine's step makes of them."""

from __future__ import annotations

import gc
import subprocess
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
from hytrain.optimizer.layer_gradient import LayerGradient
from hytrain.optimizer.pass_guide import PassGuide
from hytrain.optimizer.reduction import GradientReducer
from hytrain.placement.manager import PlacementManager
from hytrain.placement.solve_schedule import SolveSchedule
from hytrain.tools.planner.cluster import UpdateLaunchTimes
from hytrain.tools.planner.problem import Model
from hytrain.tools.profiler import update_launches
from hytrain.tools.profiler.update_launches import (
    TrainedSteps,
    UpdatedKind,
    UpdatedLayers,
)

full = pytest.mark.parity_full
pytestmark = pytest.mark.timeout(60)

WIDTH, HEAD, STEPS = 64, 2048, 3
CPU = torch.device("cpu")
SENT, UPDATED = "UpdatePipeline.send", "LayerUpdate.apply"


class Matrices(nn.Module):
    """A block, whose forward is called as a whole."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.all = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in self.all:
            x = matrix(x)
        return x


class Deep(nn.Module):
    """Blocks of some matrices each, behind them a large one that is no block."""

    def __init__(self, blocks: int, matrices: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Matrices(matrices) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, HEAD, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().pow(2).mean()


@contextmanager
def counted() -> Generator[Counter[str]]:
    """Calls of the package's functions, each by its name, on this thread and on autograd's."""
    found: Counter[str] = Counter()
    root = Path(hytrain.__path__[0])
    package, tools = str(root), str(root / "tools")

    def count(frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(package) and not name.startswith(tools):
            found[frame.f_code.co_qualname] += 1

    gc.collect()
    gc.disable()  # or the end of an earlier engine, which is in cycles, would be among them
    # On a CPU backward runs on the thread that asks for it.
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)
        gc.enable()


def of_training(blocks: int, fraction: float, matrices: int = 1) -> Counter[str]:
    """Calls of some steps of an engine."""

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


def of_profile(on_gpu: int, on_cpu: int, matrices: int) -> Counter[str]:
    kind = UpdatedKind(torch.bfloat16, sums_squares=matrices == 1, parameters=matrices)
    steps = TrainedSteps(UpdatedLayers(on_gpu, on_cpu), CPU, kind)
    for _ in range(2):
        steps.step()
    with counted() as found:
        for _ in range(STEPS):
            steps.step()
    steps.close()
    return found


@pytest.fixture
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is measured."""
    monkeypatch.setattr(SolveSchedule, "measures_next", lambda _: False)


POLLED = {
    "CostEstimator._add",
    "CostEstimator._close",
    "CpuUpdater.is_fetched",
    "CpuUpdater.release_fetched",
    "GradientRoom.is_short",
    "LayerUpdate.release_gradient",
}
"""Called as often as the worker, on its thread, is found to have come along."""


@pytest.mark.usefixtures("_unmeasured", "process_group")
@pytest.mark.parametrize(("fraction", "matrices"), [pytest.param(0.5, 1, marks=full), (0.5, 3)])
def test_all_that_an_engine_calls_for_a_layer_is_in_a_profiled_step(
    fraction: float, matrices: int
) -> None:
    """Hooks of forward and backward, and every function below them: as often for each block."""
    few, many = 5, 13

    def a_block(calls: Callable[[int], Counter[str]]) -> dict[str, int]:
        less, more = calls(few), calls(many)
        names = more.keys() - POLLED
        return {name: more[name] - less[name] for name in names if more[name] != less[name]}

    def profiled(blocks: int) -> Counter[str]:
        on_gpu = round(fraction * (blocks + 1))
        return of_profile(on_gpu, blocks + 1 - on_gpu, matrices)

    trained = a_block(lambda blocks: of_training(blocks, fraction, matrices))
    assert trained == a_block(profiled)
    assert trained[SENT] == trained["GradientReducer.consume"] == STEPS * (many - few)
    assert trained.get(UPDATED, 0) == fraction * STEPS * (many - few)
    assert trained["PassGuide.enter_forward"] == STEPS * (many - few)


AROUND = (
    "HyTrainConfig.batch_shares",
    "HyTrainEngine.",
    "HyTrainZeroOptimizer.overlapping_partition_gradients_reduce_epilogue",
    "PlacementManager.decisions",
    "RunReport.after_step",
    "ShardCollectives.reporting_failures",
    "StepWarnings.",
    "Tracing.",
    "check_graph",
    "engine_view.",
    "report_step",
    "running_tracer",
)
"""What HyTrainEngine's own methods are, and what they ask before and behind a step."""


@pytest.mark.usefixtures("_unmeasured", "process_group")
def test_all_but_the_engine_itself_is_in_a_profiled_step() -> None:
    """Of what a step calls once, or some times: only what stands around the optimizer is not."""
    trained, profiled = of_training(5, 1.0), of_profile(6, 0, 1)
    missing = {name for name in trained if not profiled[name]}
    assert {name for name in missing if not name.startswith(AROUND)} == set()


ALONE = """
import torch
from hytrain.tools.profiler.update_launches import UpdatedKind, update_launches
update_launches(torch.device("cpu"), UpdatedKind(torch.bfloat16))
assert not torch.distributed.is_initialized()
"""


def test_a_process_without_a_process_group_is_measured() -> None:
    """``hytrain profile`` alone for one GPU; other tests of this process have joined a group."""
    subprocess.run([sys.executable, "-c", ALONE], check=True)


NONE = dict.fromkeys(UpdateLaunches.model_fields, 0.0)


@pytest.mark.usefixtures("_unmeasured", "process_group")
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_plan_counts_the_launches_of_a_training_step(fraction: float) -> None:
    """And the layers on either side, as it counts for equal layers and what is outside."""
    blocks = 17
    parameters = blocks * WIDTH**2 + WIDTH * HEAD
    model = Model("m", blocks, parameters, outside=(0, WIDTH * HEAD))
    layers = model.num_updates
    k = round(fraction * layers)
    found = of_training(blocks, k / layers)
    sizes = [round(size) for size in model.update_sizes]

    def on_gpu(**one: float) -> float:
        return UpdateLaunchTimes(UpdateLaunches(**NONE | one)).on_gpu(sizes)[k]

    def each_step(name: str) -> float:
        return found[name] / STEPS

    assert on_gpu(launch_ms=1.0) == pytest.approx(each_step("GroupedAdam.launch"))
    assert on_gpu(gpu_layer_ms=1.0) == pytest.approx(each_step(UPDATED))
    assert on_gpu(gpu_step_ms=1.0) == pytest.approx(each_step("DeviceUpdate.run"))
    added = UpdateLaunches(**NONE | {"cpu_layer_ms": 1.0})
    passes = UpdateLaunchTimes(added).in_passes(k, layers - k)
    assert passes == pytest.approx(each_step("CpuUpdater.send"))


_clock = SimpleNamespace(now=0.0)


def _slow(function: Callable[..., Any], calls: Callable[..., int]) -> Callable[..., Any]:
    """Takes a millisecond of a clock for each call more."""

    def slowed(*arguments: Any, **named: Any) -> Any:
        _clock.now += 1e-3 * calls(*arguments)
        return function(*arguments, **named)

    return slowed


@pytest.mark.parametrize("moments", [pytest.param("fp32", marks=full), "8bit"])
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
        (PlacementManager, "begin_backward", lambda *_: 6),
        (PassGuide, "enter_forward", lambda *_: 3),
        (GradientReducer, "consume", lambda *_: 1),
        # Of the passes that a profile has measured: not once more.
        (LayerGradient, "take_all", lambda *_: 50),
    )
    for owner, name, calls in slow:
        monkeypatch.setattr(owner, name, _slow(getattr(owner, name), calls))
    kind = UpdatedKind(torch.bfloat16, moments, parameters=3)
    found = update_launches.update_launches(CPU, kind)
    assert found.passes_ms == pytest.approx(6, abs=1e-6)
    assert found.gpu_layer_passes_ms == pytest.approx(3 + 1, abs=1e-6)
    # A CPU-placed layer's norm is taken by itself, those of all others together.
    assert found.cpu_layer_ms == pytest.approx(5 + 3 + 3 + 1, abs=1e-6)
    assert found.gpu_step_ms == pytest.approx(2, abs=1e-6)
    if moments == "fp32":
        assert found.launch_ms == pytest.approx(10, abs=1e-6)
        assert found.gpu_layer_ms == pytest.approx(1, abs=1e-6)
    else:
        assert found.launch_ms + found.gpu_layer_ms == pytest.approx(1, abs=1e-6)
