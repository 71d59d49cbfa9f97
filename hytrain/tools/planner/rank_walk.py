"""One rank between two decisions: its GPU, the host that launches its work, its update worker.

Plain arithmetic on times; step_simulator.py says what is walked, and joins the ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.tools.planner.launching import StepLaunches


@dataclass(slots=True)
class Clocks:
    """How far a GPU and the host that launches its work have come, seconds.

    Attributes:
        device: what is launched is computed up to then.
        host: next, it launches.
        needs: of compute's measured time, the device's own share.
        launching: what launching it takes, as a share of the same.
    """

    device: float
    host: float
    needs: float
    launching: float

    def compute(self, seconds: float, ready: float = 0.0) -> None:
        """A layer or several; ``ready``: when the device may begin."""
        begin = max(self.device, self.host, ready)
        self.host += self.launching * seconds
        self.device = max(begin + self.needs * seconds, self.host)

    def wait_on_host(self, until: float) -> float:
        """The host launches no more up to then; returns for how long."""
        waited = max(0.0, until - self.host)
        self.host += waited
        return waited


@dataclass(frozen=True, slots=True)
class Passes:
    """When a rank's gradients are final, from the last layer to the first, and how long its host
    waited for its worker."""

    final: list[float]
    waited: float


@dataclass(frozen=True, slots=True)
class RankWalk:
    """One rank's times, seconds. Equal ranks are walked once.

    Attributes:
        first: of a layer's forward that waits for weights.
        middle: of all that comes between the first forward and the last backward.
        last: of a layer's backward that gives gradients.
        layers: of the model.
        gpu_layers: K.
        gpu_update: of one layer's shard.
        gpu_written: the same with its copy to the host, where weights are kept there.
        cpu_update: of one layer's shard in one pass, copies beside it.
        cpu_preview: of the second one, the weights' copy beside it.
        chunk: of its first chunk's way to the host.
        back: of its last one's back.
        launches: of its host.
    """

    first: float
    middle: float
    last: float
    layers: int
    gpu_layers: int
    gpu_update: float
    gpu_written: float
    cpu_update: float
    cpu_preview: float
    chunk: float
    back: float
    launches: StepLaunches

    def passes(self, gathered: Sequence[float], busy: float) -> Passes:
        """From a decision, at 0, through both passes.

        Args:
            gathered: when each layer's new weights are there, the first one's first.
            busy: seconds of them for which the worker updates.
        """
        compute = self.layers * (self.first + self.last) + self.middle
        launched = self.launches.passes_beside(busy, self.gpu_layers)
        needs = self.launches.device_share
        late = self.launches.update_seconds(self.gpu_layers, needs * compute - launched)
        clocks = Clocks(
            device=max(self.gpu_layers * self.gpu_update, late),
            host=late + self.launches.end,
            needs=needs,
            launching=launched / compute if compute > 0.0 else 0.0,
        )
        waited = 0.0
        if self.first > 0.0:  # a rank without samples waits for nothing
            for layer, weights in enumerate(gathered):
                if layer >= self.gpu_layers:  # for the worker the host waits, too
                    waited += clocks.wait_on_host(weights)
                clocks.compute(self.first, weights)
        clocks.compute(self.middle)
        final: list[float] = []
        for _ in range(self.layers):
            clocks.compute(self.last)
            final.append(clocks.device)
        return Passes(final, waited)

    def busy_seconds(self, waited: float, *, clipped: bool) -> float:
        """For which its worker updates while its host has something to launch.

        ``waited``: seconds for which the host waited for the worker.
        """
        each = self.cpu_update + (self.cpu_preview if clipped else 0.0)
        return max(0.0, (self.layers - self.gpu_layers) * each - waited)

    def updated(self, final: Sequence[float], *, clipped: bool) -> list[float]:
        """When each layer's shard has been, counted from the decision.

        ``final``: when each layer's gradient was, ascending from the last layer to the first: 0.
        """
        updated = [(number + 1) * self.gpu_written for number in range(self.gpu_layers)]
        updated += [0.0] * (self.layers - self.gpu_layers)
        ready: list[int] = []
        held: list[int] = []  # previewed in vain, to be previewed anew after the decision
        is_second = [False] * self.layers
        coming = self.layers - 1  # gradients become final from the last layer down
        now = final[-1]
        left = self.layers - self.gpu_layers
        while left:
            if not ready:  # the next gradient; where all are there, the decision
                now = max(now, final[coming] if coming >= self.gpu_layers else 0.0)
            while coming >= self.gpu_layers and final[coming] <= now:
                heapq.heappush(ready, coming)
                coming -= 1
            if held and now >= 0.0:
                ready += held
                heapq.heapify(ready)
                held = []
            layer = heapq.heappop(ready)
            begin = max(now, final[layer] + self.chunk)
            if clipped and begin < 0.0:
                now = begin + self.cpu_update
                is_second[layer] = True
                held.append(layer)
                continue
            now = begin + (self.cpu_preview if is_second[layer] else self.cpu_update)
            updated[layer] = now + self.back
            left -= 1
        return updated
