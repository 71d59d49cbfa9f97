"""The host time that launching training takes, beyond the model's own passes.

Models of small blocks are trained by an engine's optimizer, hooks and pipeline, beside equal models
whose gradients are taken over as in the profile's passes. The device and the update threads have
next to nothing to do. The additional time of the trained models is that of training. Some have
their layers on the GPU and some on the CPU, some share launches and some do not: the differences
between such steps are the times of a layer and of a launch.

Not counted is what DeepSpeed's own engine does around the optimizer, once a step: without the job's
process group there is no engine. Nor is what all steps take after their decision, whatever is
updated where: plans have it in the gap at a step's end.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hytrain.comm.collectives import ShardCollectives
from hytrain.config import HyTrainConfig, OffloadConfig
from hytrain.engine.build import BuildSettings
from hytrain.engine.build_optimizer import build_optimizer
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.profile_file import UpdateLaunches
from hytrain.hardware.host_share import HostShare
from hytrain.kernels.clipping import ClipSettings
from hytrain.model.backward_hooks import before_backward
from hytrain.model.discovery import find_layers
from hytrain.offload.device_update import batches
from hytrain.offload.update_groups import LIMITS, GroupLimits
from hytrain.optimizer.engine_view import EngineView
from hytrain.optimizer.layer_guards import LayerGuards
from hytrain.optimizer.pass_guide import PassGuide
from hytrain.tools.profiler.gradient_sink import GradientSink

_WIDTH = 64
"""Elements of a parameter."""
_CYCLE = 4
"""Steps that are averaged: in training every fourth step has marks."""
_CYCLES = 3
_WARM = 12
"""Steps before measuring: kernels compile, the allocator fills, and every step has marks."""
_TURNS = 3


@dataclass(frozen=True, slots=True)
class UpdatedLayers:
    """Layers of a measured step: the first ``on_gpu`` on the GPU, the others on the CPU.

    Those on the GPU share launches by ``limits``.
    """

    on_gpu: int
    on_cpu: int
    limits: GroupLimits = LIMITS

    @property
    def number(self) -> int:
        """Number of all layers."""
        return self.on_gpu + self.on_cpu


CASES = (
    UpdatedLayers(0, 8),
    UpdatedLayers(0, 24),
    UpdatedLayers(16, 0),
    UpdatedLayers(32, 0),
    UpdatedLayers(16, 0, replace(LIMITS, most_layers=1)),
)
"""As many as there are terms: the times of any step, of a layer on the CPU, of one on the GPU, of
a launch, and of a step that has any layer on the GPU."""


@dataclass(frozen=True, slots=True)
class UpdatedKind:
    """The kind of the model's layers.

    Attributes:
        dtype: that of gradients and training copy.
        moments: how moments are kept.
        sums_squares: whether gradients come with the sums of squares for their norm. Those of small
            layers do only if a layer has one parameter; the measured layers then have one.
        parameters: parameter tensors of a layer.
    """

    dtype: torch.dtype
    moments: MomentsName = FP32
    sums_squares: bool = False
    parameters: int = 1


class HostSeconds(NamedTuple):
    """Seconds of the host for a step: in forward and backward, and in step()."""

    passes: float
    step: float = 0.0


class _OneRank(ShardCollectives):
    """Collectives of a single rank, without a process group."""

    def __init__(self) -> None:
        self.group = None
        self.rank, self.world_size, self.is_nccl = 0, 1, False
        self.watch = self.trace = self._gate = None


class _Block(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(_WIDTH) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return x


class _Blocks(nn.Module):
    def __init__(self, number: int, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(parameters) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _model(layers: UpdatedLayers, device: torch.device, kind: UpdatedKind) -> _Blocks:
    parameters = 1 if kind.sums_squares else kind.parameters
    return _Blocks(layers.number, parameters).to(device, kind.dtype)


class BarePasses:
    """Passes of a model without training; gradients are taken over as in a profile's passes."""

    def __init__(self, layers: UpdatedLayers, device: torch.device, kind: UpdatedKind) -> None:
        """Hooks stay on the model until :meth:`close`."""
        self._model = _model(layers, device, kind)
        self._input = torch.ones(_WIDTH, dtype=kind.dtype, device=device)
        found = find_layers(self._model, list(self._model.parameters()))
        self._sink = GradientSink(found, device)

    def step(self) -> HostSeconds:
        """Makes the passes of a step and returns their host time."""
        begin = time.perf_counter()
        loss = self._model(self._input)
        self._sink.begin_pass()
        loss.backward()
        self._sink.end_pass()
        return HostSeconds(time.perf_counter() - begin)

    def close(self) -> None:
        """Removes the hooks."""
        self._sink.close()


class TrainedSteps:
    """Steps of a model of small layers, by an engine's optimizer and hooks."""

    def __init__(self, layers: UpdatedLayers, device: torch.device, kind: UpdatedKind) -> None:
        """Starts an update worker; :meth:`close` ends it."""
        model = self._model = _model(layers, device, kind)
        self._input = torch.ones(_WIDTH, dtype=kind.dtype, device=device)
        config = HyTrainConfig(
            gpu_fraction=layers.on_gpu / layers.number,
            moments=kind.moments,
            offload=OffloadConfig(cpu_threads=1),
        )
        settings = BuildSettings(
            stage=2,
            device=device,
            clip=ClipSettings(1.0, True),
            mean=True,
            host=HostShare(ranks=1, cores=1, pool_ranks={}),
        )
        self.optimizer = build_optimizer(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            config,
            settings,
            _OneRank(),
            EngineView(lambda: True, lambda: True, lambda: None, lambda: 1),
            layers.limits,
        )
        self._guards = LayerGuards(model, PassGuide(self.optimizer.passes, self.optimizer.kept))
        self.optimizer.weights.when_closed(self._guards.close)
        on_gpu = self.optimizer.layer_states[: layers.on_gpu]
        self.num_launches = len(batches(on_gpu, layers.limits))

    def step(self) -> HostSeconds:
        """Makes a step; returns its host time, as in a launch-bound step.

        Waits for the device and for the update threads are left out: these have next to nothing to
        do.
        """
        optimizer = self.optimizer
        begin = time.perf_counter()
        optimizer.passes.begin_forward(enters_model=False)
        optimizer.clear_backward_seen_flag()
        with self._guards.watching():
            loss = self._model(self._input)
        before_backward(loss, self._enter_backward)
        optimizer.passes.announce_backward()
        optimizer.scale_if_loss(loss).backward()
        optimizer.backward_epilogue()
        optimizer.exit_backward()
        passes = time.perf_counter() - begin
        pipeline = optimizer.pipeline
        pipeline.streams.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        pipeline.cpu.wait_all()
        pipeline.streams.synchronize()
        return HostSeconds(passes, seconds)

    def _enter_backward(self, _gradient: object) -> None:
        """Begins backward as DeepSpeed's engine does, when the gradient of its output arrives."""
        self.optimizer.backward_prologue()
        self.optimizer.enter_backward()

    def close(self) -> None:
        """Ends the worker and frees the memory."""
        self.optimizer.destroy()


def update_launches(device: torch.device, kind: UpdatedKind) -> UpdateLaunches:
    """Host time of training by what a step has; without a GPU it includes the updates."""
    try:
        return terms_of(*_cases(device, kind))
    finally:
        # An optimizer's parts refer to each other: only collecting them frees their device memory.
        gc.collect()


def _cases(device: torch.device, kind: UpdatedKind) -> tuple[list[HostSeconds], list[int]]:
    """What training adds to a step of each case, and the launches that each made."""
    with ExitStack() as opened:
        trained = [
            opened.enter_context(closing(TrainedSteps(case, device, kind))) for case in CASES
        ]
        bare = [opened.enter_context(closing(BarePasses(case, device, kind))) for case in CASES]

        def cycle(steps: TrainedSteps | BarePasses, number: int = _CYCLE) -> HostSeconds:
            """The mean of some steps, each begun with an idle device."""
            made: list[HostSeconds] = []
            for _ in range(number):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                made.append(steps.step())
            return _of_each(statistics.mean, made)

        for steps in (*trained, *bare):
            cycle(steps, _WARM)
        seen: dict[Any, list[HostSeconds]] = {steps: [] for steps in (*trained, *bare)}
        for _ in range(_TURNS):  # in turns: hosts are faster or slower for seconds at a time
            for steps, cycles in seen.items():
                cycles += [cycle(steps) for _ in range(_CYCLES)]
        medians = [_of_each(statistics.median, cycles) for cycles in seen.values()]
        extra = [
            HostSeconds(with_updates.passes - alone.passes, with_updates.step)
            for with_updates, alone in zip(
                medians[: len(CASES)], medians[len(CASES) :], strict=True
            )
        ]
        return extra, [steps.num_launches for steps in trained]


def _of_each(pick: Callable[[Sequence[float]], float], rows: Sequence[HostSeconds]) -> HostSeconds:
    return HostSeconds(*map(pick, zip(*rows, strict=True)))


def terms_of(extra: Sequence[HostSeconds], launches: Sequence[int]) -> UpdateLaunches:
    """Solves for the time of each term from the times of the cases.

    Args:
        extra: host time of a step of each case: in the passes, beyond that of the model alone, and
            in step().
        launches: launches of each case. If every layer has its own, as with rounded moments, the
            times of a layer and of its launch are not told apart: only their sum counts.
    """
    rows = [(1.0, float(case.on_gpu), float(case.on_cpu)) for case in CASES]
    a_pass, pass_gpu, pass_cpu = _solve(rows, [each.passes for each in extra])
    rows = [
        (1.0, float(case.on_gpu > 0), float(number), float(case.on_gpu), float(case.on_cpu))
        for case, number in zip(CASES, launches, strict=True)
    ]
    _, any_gpu, launch, gpu_layer, cpu_layer = _solve(rows, [each.step for each in extra])
    return UpdateLaunches(
        gpu_step_ms=any_gpu,
        launch_ms=launch,
        gpu_layer_ms=gpu_layer,
        cpu_layer_ms=pass_cpu + cpu_layer,
        passes_ms=a_pass,
        gpu_layer_passes_ms=pass_gpu,
    )


def _solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Milliseconds of each column's term."""
    solved = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)[0].tolist()
    # A term of some microseconds may come out below zero.
    return [1e3 * max(0.0, each) for each in solved]
