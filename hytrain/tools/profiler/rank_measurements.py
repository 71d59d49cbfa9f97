"""What one rank measures of its device and its host, all ranks at once: one thing after another.

Layers, the GPU's update, copies, the CPU's update, launches of training. Hosts launch the same
faster and slower for tens of seconds on end, so passes over layers are launched again in the pauses
between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hytrain.formats.moment_kinds import MomentsName
from hytrain.formats.profile_file import CopyRates, UpdateLaunches
from hytrain.placement.calibration import (
    accumulation_seconds_per_parameter,
    gpu_seconds_per_parameter,
)
from hytrain.tools.profiler import rates
from hytrain.tools.profiler.launching import measure_slowdown
from hytrain.tools.profiler.layer_profile import LayerProfile, LayerProfiling
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.progress import Progress
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.training_load import TrainingLoad
from hytrain.tools.profiler.update_launches import UpdatedKind, update_launches

_PAUSES = 3
"""For launches, besides those between the CPU's rates."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a rank.

    Attributes:
        layer: times and memory of passes.
        update_rate: parameters/s of the GPU's update.
        copies: between host and device.
        cpu: rates of the CPU's update, and of the host's memory.
        accumulation: seconds a parameter, to add a gradient to another.
        update_launches: of training; None without a GPU.
    """

    layer: LayerProfile
    update_rate: float
    copies: CopyRates
    cpu: rates.CpuRates
    accumulation: float
    update_launches: UpdateLaunches | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurements:
    """The measurements of one rank.

    Attributes:
        device: this rank's.
        options: the same on all ranks, but for ``multiprocessors`` and ``settings``.
        ranks: all measure at once.
        cores: of the host, each rank's part.
        ranks_on_host: that share this rank's.
        shard: parameters that this rank will update.
    """

    device: torch.device
    options: ProfileOptions
    ranks: Ranks
    cores: Sequence[int]
    ranks_on_host: int
    shard: int

    def run(self, layers: LayerProfiling, dtype: torch.dtype, progress: Progress) -> Measured:
        """All of them.

        Args:
            layers: of the model.
            dtype: of its weights.
            progress: told how far the work is.
        """
        device, options, together = self.device, self.options, self.ranks.together

        def on_size(size: int, share: float) -> None:
            progress.show(0.6 * share, f"layer, micro-batch of {size}")

        def pause() -> None:
            together(lambda: layers.launch_again(_PAUSES + self._rounds))

        together(lambda: layers.measure(on_size))
        pause()
        together(lambda: layers.launch_beside(self._beside))
        pause()
        progress.show(0.6, "update on the GPU" if device.type == "cuda" else "update")
        adding = together(lambda: accumulation_seconds_per_parameter(device, dtype))
        update = together(lambda: _update_seconds(device, dtype, options.moments))
        pause()
        progress.show(0.65, "copies")
        copies = rates.copy_rates(
            device, self.ranks, seconds=options.rate_seconds, num_bytes=options.copy_bytes
        )
        progress.show(0.7, "update on the CPU")
        cpu = self._cpu_rates(pause)
        progress.show(0.85, "launches of training")
        layer = layers.result()
        kind = UpdatedKind(
            dtype,
            options.moments,
            sums_squares=layer.sums_squares,
            parameters=layer.block_tensors,
        )
        launching = together(lambda: update_launches(device, kind))
        return Measured(layer, 1.0 / update, copies, cpu, adding, launching)

    @property
    def _rounds(self) -> int:
        """Of the CPU's rates: the longest list of any rank."""
        return max(len(rates.thread_counts(cores)) for cores in self.cores)

    def _beside(self, launch: Callable[[], float]) -> float:
        elements = self.options.cpu_elements or rates.update_elements(self.ranks_on_host)
        arrays = rates.UpdateArrays(elements, self.options.moments)
        load = TrainingLoad(self.device, arrays.out_bytes)
        # The thread that launches is the real one here: of the load there are only the copies.
        threads = max(1, self.cores[self.ranks.rank] - 1)
        return measure_slowdown(launch, partial(load.beside, partial(arrays.update, threads)))

    def _cpu_rates(self, pause: Callable[[], None]) -> rates.CpuRates:
        return rates.cpu_rates(
            self.device,
            rates.thread_counts(self.cores[self.ranks.rank]),
            self._rounds,
            self.ranks,
            ranks_on_host=self.ranks_on_host,
            seconds=self.options.rate_seconds,
            elements=self.options.cpu_elements,
            moments=self.options.moments,
            parameters=self.shard,
            between=pause,
        )


def _update_seconds(device: torch.device, dtype: torch.dtype, moments: MomentsName) -> float:
    """Of the update on a stream of its own, as in training: the current one may be limited."""
    if device.type != "cuda":
        return gpu_seconds_per_parameter(device, dtype, moments)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return gpu_seconds_per_parameter(device, dtype, moments)
