"""What a rank's host takes to launch its GPU's work, and what that adds to a step. Plain data.

A GPU that is ahead of its host waits for launches: the step is *launch-bound*, and what delays
launching delays the step. Two things do. Threads that update on the CPU take cores and memory
bandwidth from the launching thread: beside them launching takes ``slowdown`` times as long. And
training is the host's work, too: hooks of every layer in forward and backward, gradients that are
handed over, updates on the GPU that are launched behind backward, when nothing is queued that could
hide them; for layers that the CPU updates forward waits layer by layer.

Where the GPU has more to do than the host, launching hides behind it and adds nothing but the gap
at a step's end: the next forward's kernels are launched when the host has seen the decision.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launches:
    """Of one rank's step, in seconds; nothing is launched by default.

    Attributes:
        passes: to launch a step's forward and backward, nothing beside it.
        slowdown: ratio of the same beside updates on the CPU.
        on_gpu: to launch the GPU's updates of 0, 1, ... L layers; empty for nothing.
        in_passes: what training adds to the launches of the passes with 0, 1, ... L layers on the
            GPU: hooks, gradients that are handed over, waits for weights; empty for nothing.
        device_share: what the device needs of the time that passes take on it, by themselves; the
            rest of it waits for launches.
        after_decision: from a decision to the first kernel of the next forward.
    """

    passes: float = 0.0
    slowdown: float = 1.0
    on_gpu: tuple[float, ...] = ()
    in_passes: tuple[float, ...] = ()
    device_share: float = 1.0
    after_decision: float = 0.0

    def passes_beside(self, busy: float, gpu_layers: int = 0) -> float:
        """The passes' launches, updates on the CPU going on for so many seconds of them."""
        passes = self.passes + (self.in_passes[gpu_layers] if self.in_passes else 0.0)
        delayed = passes + (1.0 - 1.0 / self.slowdown) * busy
        return min(self.slowdown * passes, delayed)

    def update_seconds(self, gpu_layers: int, idle: float) -> float:
        """By which the launches of the GPU's updates outlast backward.

        ``idle``: for which the host has nothing to launch in the passes: so far it is ahead.
        """
        launched = self.on_gpu[gpu_layers] if self.on_gpu else 0.0
        return max(0.0, launched - max(0.0, idle))
