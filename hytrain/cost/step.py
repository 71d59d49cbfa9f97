"""Every layer's times on one rank, from which a step is predicted. Plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hytrain.config import CHUNK_ELEMENTS
from hytrain.errors import PlacementError

_COMMIT_SHARE = 26 / 30
_PREVIEW_SHARE = 0.8


def clipped_passes(update: float) -> tuple[float, float]:
    """Estimates the seconds of a clipped step's commit and preview that were not measured.

    The commit is estimated by its share of an update's bytes. A preview moves 16/30 of them, but
    took 0.67 to 0.93 of the time on the host of an H200 (experiments/solve_k: median 0.80 of 14
    windows with every step clipped); workers of two H200 were busy 1.7 times as long in clipped
    steps as in others (experiments/unequal_gpus, case half).

    ``update``: seconds of the pass of an unclipped step over the same parameters.
    """
    return _COMMIT_SHARE * update, _PREVIEW_SHARE * update


def _check_seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise PlacementError(f"{name} must be finite and not negative seconds, got {value}")


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """One layer's times on this rank, in seconds, without waits.

    Attributes:
        parameters: elements of this rank's shard of the layer's state.
        forward: forward of the step's first micro-batch, without waits for weights or GPU updates.
        backward: backward of the step's last micro-batch, including recomputation and the hand-over
            of gradients.
        to_host: copying the shard's gradient to the host.
        cpu_update: the CPU worker's one pass over the layer (commit_then_preview, or a direct
            commit) if no second one follows.
        cpu_commit: the pass that it makes instead in a clipped step, over a layer whose turn comes
            before the clip coefficient is known (mostly a commit without output).
        cpu_preview: the second pass that follows on ``cpu_commit`` once the coefficient is known.
        cpu_late: the only pass over a layer that is updated after the decision.
        to_device: copying the shard's new training copy back.
        gpu_update: the update on the GPU, with the GPU to itself.
        write_back: copying to the host the new training copy of a layer that the GPU has updated,
            if weights are kept there.

    Raises:
        PlacementError: a time is negative or not finite, or ``parameters`` is negative.
    """

    name: str
    parameters: int
    forward: float
    backward: float
    to_host: float
    cpu_update: float
    cpu_commit: float
    cpu_preview: float
    to_device: float
    gpu_update: float
    write_back: float = 0.0
    cpu_late: float = 0.0

    def __post_init__(self) -> None:
        if self.parameters < 0:
            raise PlacementError(f"layer '{self.name}': {self.parameters} parameters")
        times = (
            ("forward", self.forward),
            ("backward", self.backward),
            ("to_host", self.to_host),
            ("cpu_update", self.cpu_update),
            ("cpu_commit", self.cpu_commit),
            ("cpu_preview", self.cpu_preview),
            ("to_device", self.to_device),
            ("gpu_update", self.gpu_update),
            ("write_back", self.write_back),
            ("cpu_late", self.cpu_late),
        )
        for name, value in times:
            _check_seconds(f"layer '{self.name}': {name}", value)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step on one rank: its layers in forward order, and what belongs to none of them.

    Micro-batches that go through the layers together count as one.

    Attributes:
        between: seconds from the end of the first micro-batch's forward to the start of the last
            micro-batch's backward: the loss, and all other micro-batches.
        tail: seconds from the end of the last backward to the start of the next forward, without
            updates: the decision on clipping, the user's own code.
        clipped_share: share of the steps whose gradient was clipped, in [0, 1].
        chunk_elements: elements of a chunk, the unit of copies; a layer's update begins when its
            first chunk is on the host, and its last chunk's copy back follows the update.
        update_threads: threads of the CPU's updates while this was measured; None if it was not
            (a plan, an estimate) or they are not known (records before 26 November 2026).
        late_from: for 0, 1, ... L layers on the GPU, the first of the layers that the CPU updates
            after the decision on clipping (split master weights); those before it are updated when
            their gradients come. Empty: all of them are updated then.

    Raises:
        PlacementError: there is no layer, or a value is out of its range.
    """

    layers: tuple[LayerCosts, ...]
    between: float = 0.0
    tail: float = 0.0
    clipped_share: float = 0.0
    chunk_elements: int = CHUNK_ELEMENTS
    update_threads: int | None = None
    late_from: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlacementError("costs of a step without layers")
        _check_seconds("between", self.between)
        _check_seconds("tail", self.tail)
        if not 0.0 <= self.clipped_share <= 1.0:
            raise PlacementError(f"clipped_share must be in [0, 1], got {self.clipped_share}")
        if self.chunk_elements < 1:
            raise PlacementError(f"chunk_elements must be at least 1, got {self.chunk_elements}")
        if len(self.late_from) not in (0, len(self.layers) + 1):
            raise PlacementError(
                f"late_from has {len(self.late_from)} numbers for {len(self.layers)} layers"
            )

    def first_late(self, gpu_layers: int) -> int:
        """The first layer that is updated after the decision, if the CPU updates it; L: none."""
        return self.late_from[gpu_layers] if self.late_from else len(self.layers)

    @property
    def backward_seconds(self) -> float:
        """t_B: the last micro-batch's backward."""
        return sum(layer.backward for layer in self.layers)

    @property
    def forward_seconds(self) -> float:
        """The first micro-batch's forward."""
        return sum(layer.forward for layer in self.layers)

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step without any update."""
        return self.forward_seconds + self.between + self.backward_seconds + self.tail

    @property
    def cpu_seconds(self) -> float:
        """t_U: the CPU's work for a step if it updated every layer."""
        first = self.first_late(0)
        early, late = self.layers[:first], self.layers[first:]
        unclipped = sum(layer.cpu_update for layer in early)
        clipped = sum(layer.cpu_commit + layer.cpu_preview for layer in early)
        seconds = (1.0 - self.clipped_share) * unclipped + self.clipped_share * clipped
        return seconds + sum(layer.cpu_late for layer in late)

    @property
    def alpha(self) -> float:
        """GPU over CPU update time, of all layers together; 0 if the CPU needs no time."""
        cpu = self.cpu_seconds
        return sum(layer.gpu_update for layer in self.layers) / cpu if cpu > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Launches:
    """Seconds that a rank's host takes to launch its GPU's work; none by default.

    A GPU that is ahead of its host waits for launches: the step is *launch-bound*. Two things delay
    launching. Threads that update on the CPU take cores and memory bandwidth from the launching
    thread: beside them it takes ``slowdown`` times as long. And training adds to the host's work:
    hooks of every layer, the hand-over of gradients, updates on the GPU that are launched after
    backward, when nothing is queued that could hide them; for layers that the CPU updates, forward
    waits layer by layer.

    If the GPU has more to do than the host, launching hides behind it and adds nothing but the
    gap at a step's end: the next forward's kernels are launched when the host has seen the
    decision.

    Attributes:
        passes: launching a step's forward and backward, with nothing beside it.
        slowdown: factor by which updates on the CPU lengthen that.
        on_gpu: launching the GPU's updates of 0, 1, ... L layers; empty: 0.
        in_passes: what training adds to the launches of the passes with 0, 1, ... L layers on the
            GPU: hooks, the hand-over of gradients, waits for weights; empty: 0.
        device_share: share of the passes' time, when alone on the device, that the device needs;
            for the rest it waits for launches.
        after_decision: from a decision to the first kernel of the next forward.
    """

    passes: float = 0.0
    slowdown: float = 1.0
    on_gpu: tuple[float, ...] = ()
    in_passes: tuple[float, ...] = ()
    device_share: float = 1.0
    after_decision: float = 0.0

    def passes_beside(self, busy: float, gpu_layers: int = 0) -> float:
        """Seconds of the passes' launches, with ``busy`` seconds of CPU updates beside them."""
        passes = self.passes + (self.in_passes[gpu_layers] if self.in_passes else 0.0)
        delayed = passes + (1.0 - 1.0 / self.slowdown) * busy
        return min(self.slowdown * passes, delayed)

    def update_seconds(self, gpu_layers: int, idle: float) -> float:
        """Seconds by which the launches of the GPU's updates outlast backward.

        ``idle``: seconds of the passes without anything to launch: the host is ahead by so much.
        """
        launched = self.on_gpu[gpu_layers] if self.on_gpu else 0.0
        return max(0.0, launched - max(0.0, idle))
