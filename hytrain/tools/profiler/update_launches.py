"""What a step's updates take of the host that launches them, in training's own code.

Small layers go through a pipeline as training has one, from gradients that are handed over to
weights that forward has waited for; of the device and of the update threads they ask next to
nothing. Some are on the GPU and some on the CPU, some share launches and some do not: what
differs between such steps is what a layer, or a launch, takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from hytrain.comm.collectives import ShardCollectives
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.profile_file import UpdateLaunches
from hytrain.kernels.clipping import ClipSettings, GradientNorm
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.gradient_copy import num_partials
from hytrain.model.discovery import LayerParameters
from hytrain.model.layer_state import LayerState
from hytrain.model.layout import lay_out
from hytrain.model.moment_format import MomentFormat
from hytrain.model.storage import ResidentStorage
from hytrain.offload.cpu_updater import CpuSettings, CpuUpdater
from hytrain.offload.device_update import batches
from hytrain.offload.pipeline import UpdatePipeline
from hytrain.offload.streams import Streams
from hytrain.offload.update_groups import LIMITS, GroupLimits

_ELEMENTS = 1 << 12
_STEPS = 15
_WARM = 3
_TURNS = 3
_HYPER = (AdamHyper(lr=1e-3),)


@dataclass(frozen=True, slots=True)
class UpdatedLayers:
    """Layers of a step that is measured.

    Attributes:
        on_gpu: how many are updated there, the first ones.
        on_cpu: the others.
        limits: by which those on the GPU share launches.
    """

    on_gpu: int
    on_cpu: int
    limits: GroupLimits = LIMITS


CASES = (
    UpdatedLayers(0, 8),
    UpdatedLayers(0, 24),
    UpdatedLayers(16, 0),
    UpdatedLayers(32, 0),
    UpdatedLayers(16, 0, replace(LIMITS, most_layers=1)),
)
"""As many as terms: what any step takes, a CPU-placed layer, a GPU-placed one, a launch, and what
a step takes that has any GPU-placed ones."""


@dataclass(frozen=True, slots=True)
class UpdatedKind:
    """Of the model's layers.

    Attributes:
        dtype: of gradients and training copy.
        moments: how they are kept.
        sums_squares: gradients come with the squares that their norm is made of.
    """

    dtype: torch.dtype
    moments: MomentsName = FP32
    sums_squares: bool = False


class _OneRank(ShardCollectives):
    """No others, and no process group."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.watch = self.trace = None


class UpdateSteps:
    """Steps of nothing but updates."""

    def __init__(self, layers: UpdatedLayers, device: torch.device, kind: UpdatedKind) -> None:
        """Starts an update worker; :meth:`close` ends it."""
        self.layers = [
            _layer(state, "gpu" if number < layers.on_gpu else "cpu", device, kind.moments)
            for number, state in enumerate(_states(layers, device, kind.dtype))
        ]
        streams = Streams(device)
        cpu = CpuUpdater(self.layers, streams, CpuSettings(1, _ELEMENTS))
        norm = GradientNorm(len(self.layers), device, ClipSettings(1.0, True), lambda _: None)
        self.pipeline = UpdatePipeline(
            self.layers, cpu, norm, streams, _OneRank(), group_limits=layers.limits
        )
        on_gpu = self.layers[: layers.on_gpu]
        self.num_launches = len(batches(on_gpu, layers.limits))
        self._gradients = [
            torch.full((layer.shard_size,), 1e-4, dtype=kind.dtype, device=device)
            for layer in self.layers
        ]
        squares = torch.full((num_partials(_ELEMENTS, device),), 1e-6, dtype=torch.float64)
        self._squares = squares.to(device) if kind.sums_squares else None

    def step(self) -> float:
        """Makes one; returns what it took of the host, as where it has launches to wait for.

        What it waits for the device, or for the update threads, is left out: there is nothing to
        do for them.
        """
        pipeline = self.pipeline
        begin = time.perf_counter()
        pipeline.begin_step(1.0, _HYPER)
        for layer, gradient in zip(reversed(self.layers), reversed(self._gradients), strict=True):
            pipeline.send(layer, gradient, self._squares)
        seconds = time.perf_counter() - begin
        pipeline.streams.synchronize()
        begin = time.perf_counter()
        pipeline.launch_outcome()
        pipeline.finish_step(_HYPER, in_line=pipeline.may_update_in_line)
        seconds += time.perf_counter() - begin
        pipeline.cpu.wait_all()
        pipeline.streams.synchronize()
        begin = time.perf_counter()
        for layer in self.layers:
            if not layer.update.waited:
                pipeline.wait(layer)
        return seconds + time.perf_counter() - begin

    def close(self) -> None:
        """Ends the worker and frees the memory."""
        self.pipeline.close()


def _states(
    layers: UpdatedLayers, device: torch.device, dtype: torch.dtype
) -> Generator[LayerState]:
    found: list[LayerParameters] = []
    for number in range(layers.on_gpu + layers.on_cpu):
        parameter = nn.Parameter(torch.zeros(_ELEMENTS, dtype=dtype, device=device))
        found.append(LayerParameters(f"layers.{number}", [("weight", parameter)]))
    group_of = {id(parameter): 0 for each in found for _, parameter in each.parameters}
    for layout in lay_out(found, group_of, 1):
        storage = ResidentStorage(layout, device)
        yield LayerState(layout, storage, 0, layout.size, [layout.size], "gpu", dtype)


def _layer(
    state: LayerState, placement: str, device: torch.device, moments: MomentsName
) -> LayerState:
    state.placement = "gpu" if placement == "gpu" else "cpu"
    state.moments = MomentFormat(moments)
    where = device if placement == "gpu" else torch.device("cpu")
    state.set_state(torch.zeros(state.state_bytes, dtype=torch.uint8, device=where))
    return state


@contextmanager
def _all_of(device: torch.device, kind: UpdatedKind) -> Generator[list[UpdateSteps]]:
    made: list[UpdateSteps] = []
    try:
        for case in CASES:
            made.append(UpdateSteps(case, device, kind))
        yield made
    finally:
        for each in made:
            each.close()


def update_launches(device: torch.device, kind: UpdatedKind) -> UpdateLaunches | None:
    """Of the host, by what a step has; None without a GPU, where nothing is launched."""
    if device.type != "cuda":
        return None
    return measured_launches(device, kind)


def measured_launches(device: torch.device, kind: UpdatedKind) -> UpdateLaunches:
    """As :func:`update_launches`, on any device: without a GPU with the updates themselves."""
    with _all_of(device, kind) as cases:
        for steps in cases:
            for _ in range(_WARM):  # compiles kernels, fills the allocator
                steps.step()
        seconds: list[list[float]] = [[] for _ in cases]
        for _ in range(_TURNS):  # in turns: hosts are faster and slower for seconds on end
            for steps, found in zip(cases, seconds, strict=True):
                found += [steps.step() for _ in range(_STEPS)]
        launches = [steps.num_launches for steps in cases]
    return terms_of([statistics.median(found) for found in seconds], launches)


def terms_of(seconds: Sequence[float], launches: Sequence[int]) -> UpdateLaunches:
    """What one of each takes, so that the cases take what they took.

    Args:
        seconds: of a step of each case.
        launches: that each made. Where all layers have one of their own, as with rounded moments,
            what a layer takes and what its launch does are not told apart: only their sum counts.
    """
    rows = [
        (1.0, float(case.on_gpu > 0), float(number), float(case.on_gpu), float(case.on_cpu))
        for case, number in zip(CASES, launches, strict=True)
    ]
    solved = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)[0].tolist()
    # A term of some microseconds may come out below nothing.
    _, any_gpu, launch, gpu_layer, cpu_layer = (1e3 * max(0.0, each) for each in solved)
    return UpdateLaunches(
        gpu_step_ms=any_gpu, launch_ms=launch, gpu_layer_ms=gpu_layer, cpu_layer_ms=cpu_layer
    )
