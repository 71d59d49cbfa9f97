"""What a rank's host takes to launch its GPU's work, and what that adds to a step. Plain data.

A GPU that is ahead of its host waits for launches: the step is *launch-bound*, and what delays
launching delays the step. Two things do. Threads that update on the CPU take cores and memory
bandwidth from the launching thread: beside them launching takes ``slowdown`` times
as long. And where updates are on the GPU, their launches are the host's work too, behind backward,
when nothing is queued that could hide them.

Where the GPU has more to do than the host, launching hides behind it and adds nothing but the gap
at a step's end: the next forward's kernels are launched when the host has seen the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.passes import micro_seconds


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """Of one rank and plan, in seconds; nothing is launched by default.

    Attributes:
        passes: to launch a step's forward and backward, nothing beside it.
        slowdown: ratio of the same beside updates on the CPU.
        update: to launch one layer's update on the GPU.
        end: from a decision to the first kernel of the next forward. About as long as launching a
            block: 0.7, 1.0 and 1.2 times that on three hosts (experiments/solve_k/regimes.json,
            the tail of steps without updates on the GPU).
    """

    passes: float = 0.0
    slowdown: float = 1.0
    update: float = 0.0
    end: float = 0.0

    @staticmethod
    def of(
        gpu: GpuProfile, sizes: Sequence[tuple[int, int]], layers: int, activations: Activations
    ) -> StepLaunches:
        """For micro-batches of these sizes (numbers of them, samples)."""
        if gpu.launches is None or not sizes:
            return StepLaunches()
        times, passes = gpu.launches, 0.0
        for count, size in sizes:
            # A recomputed forward is launched again.
            kept = gpu.forward_ms.at(size) + gpu.backward_ms.at(size)
            again = 1e3 * sum(micro_seconds(gpu, size, activations)) / kept if kept > 0.0 else 1.0
            passes += count * (layers * again * times.layer_ms.at(size) + times.outside(size))
        end = times.layer_ms.at(sizes[0][1])
        return StepLaunches(passes / 1e3, times.slowdown, times.update_ms / 1e3, end / 1e3)

    def passes_beside(self, busy: float) -> float:
        """The passes' launches, updates on the CPU going on for so many seconds of them."""
        delayed = self.passes + (1.0 - 1.0 / self.slowdown) * busy
        return min(self.slowdown * self.passes, delayed)

    def update_seconds(self, gpu_layers: int, idle: float) -> float:
        """By which the launches of the GPU's updates outlast backward.

        Args:
            gpu_layers: that are updated.
            idle: for which the host has nothing to launch in the passes: so far it is ahead.
        """
        return max(0.0, gpu_layers * self.update - max(0.0, idle))
