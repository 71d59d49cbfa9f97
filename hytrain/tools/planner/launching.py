"""What a rank's host takes to launch its GPU's work, and what that adds to a step. Plain data.

A GPU that is ahead of its host waits for launches: the step is *launch-bound*, and what delays
launching delays the step. Two things do. Threads that update on the CPU take cores and memory
bandwidth from the launching thread: beside them launching takes ``slowdown`` times
as long. And training is the host's work, too: hooks tell of every layer in forward and backward,
and hand its gradient over; updates on the GPU are launched behind backward, when nothing is queued
that could hide them, small neighbours together; for the others forward waits layer by layer.

Where the GPU has more to do than the host, launching hides behind it and adds nothing but the gap
at a step's end: the next forward's kernels are launched when the host has seen the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile, UpdateLaunchTimes
from hytrain.tools.planner.passes import micro_seconds
from hytrain.tools.planner.problem import Model


@dataclass(frozen=True, slots=True)
class UpdateLaunchSeconds:
    """Of one rank's shard, with 0, 1, ... L of the model's layers on the GPU.

    Attributes:
        on_gpu: to launch the updates there.
        in_passes: what training adds to the launches of the passes: hooks of all layers, gradients
            that are handed over, waits for weights from the CPU.
    """

    on_gpu: tuple[float, ...]
    in_passes: tuple[float, ...]

    @staticmethod
    def of(times: UpdateLaunchTimes, model: Model, fraction: float) -> UpdateLaunchSeconds:
        """Of so large a part of the model's state."""
        sizes = [round(fraction * size) for size in model.updated_sizes]
        on_gpu = times.on_gpu(sizes)
        # Of L equal layers of a plan, in layers that training has: as where training places them.
        numbers = [round(k * len(sizes) / model.num_layers) for k in range(model.num_layers + 1)]
        return UpdateLaunchSeconds(
            tuple(on_gpu[number] / 1e3 for number in numbers),
            tuple(times.in_passes(number, len(sizes) - number) / 1e3 for number in numbers),
        )


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """Of one rank and plan, in seconds; nothing is launched by default.

    Attributes:
        passes: to launch a step's forward and backward, nothing beside it.
        slowdown: ratio of the same beside updates on the CPU.
        updates: what updates take besides; None for nothing.
        device_share: what the device needs of the time that passes take on it, by themselves; the
            rest of it waits for launches.
        end: from a decision to the first kernel of the next forward. About as long as launching a
            block: 0.7, 1.0 and 1.2 times that on three hosts (experiments/solve_k/regimes.json,
            the tail of steps without updates on the GPU).
    """

    passes: float = 0.0
    slowdown: float = 1.0
    updates: UpdateLaunchSeconds | None = None
    device_share: float = 1.0
    end: float = 0.0

    @staticmethod
    def of(
        gpu: GpuProfile,
        model: Model,
        sizes: Sequence[tuple[int, int]],
        activations: Activations,
        fraction: float,
    ) -> StepLaunches:
        """For micro-batches of these sizes (numbers of them, samples), and a part of the state."""
        if gpu.launches is None or not sizes:
            return StepLaunches()
        times, passes, taken, needed = gpu.launches, 0.0, 0.0, 0.0
        for count, size in sizes:
            # A recomputed forward is launched again.
            kept = gpu.forward_ms.at(size) + gpu.backward_ms.at(size)
            again = 1e3 * sum(micro_seconds(gpu, size, activations)) / kept if kept > 0.0 else 1.0
            layers = count * model.num_layers * again
            outside = 0.0 if gpu.outside_ms is None else count * gpu.outside_ms.at(size)
            passes += layers * times.layer_ms.at(size) + count * times.outside(size)
            taken += layers * kept + outside
            needed += layers * min(kept, times.device(size, kept))
            needed += min(outside, count * times.outside_device(size, outside / count))
        return StepLaunches(
            passes=passes / 1e3,
            slowdown=times.slowdown,
            updates=UpdateLaunchSeconds.of(times.updates, model, fraction),
            device_share=needed / taken if taken > 0.0 else 1.0,
            end=times.layer_ms.at(sizes[0][1]) / 1e3,
        )

    def passes_beside(self, busy: float, gpu_layers: int = 0) -> float:
        """The passes' launches, updates on the CPU going on for so many seconds of them.

        Args:
            busy: seconds.
            gpu_layers: that are updated on the GPU.
        """
        passes = self.passes
        if self.updates is not None:
            passes += self.updates.in_passes[gpu_layers]
        delayed = passes + (1.0 - 1.0 / self.slowdown) * busy
        return min(self.slowdown * passes, delayed)

    def update_seconds(self, gpu_layers: int, idle: float) -> float:
        """By which the launches of the GPU's updates outlast backward.

        Args:
            gpu_layers: that are updated.
            idle: for which the host has nothing to launch in the passes: so far it is ahead.
        """
        if self.updates is None:
            return 0.0
        return max(0.0, self.updates.on_gpu[gpu_layers] - max(0.0, idle))
