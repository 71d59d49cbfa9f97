"""What a step took: for progress bars, metrics files and tests."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass

from hytrain import _C
from hytrain.errors import HyTrainError
from hytrain.kernels.clipping import Outcome
from hytrain.offload.update_pipeline import UpdatePipeline

RECENT_STEPS = 1000
"""Number of last steps whose figures are kept, about 200 bytes each."""


@dataclass(frozen=True, slots=True)
class StepStatistics:
    """The figures of one step on this rank.

    Attributes:
        step: steps made so far, skipped ones not counted.
        gpu_fraction: share of the layers that are updated on the GPU.
        step_seconds: from the end of the last step() to the end of this one.
        update_seconds: time that the CPU worker spent in the optimizer's passes in between.
        gradient_wait_seconds: time that the CPU worker had a layer but waited for its gradient.
        outgoing_wait_seconds: time that it waited for a buffer to be copied to the device.
        issue_seconds: time that it spent queueing copies on the device.
        exposed_seconds: time that compute waited for weights in between.
        hidden_share: 1 - exposed / update, in [0, 1]; 1 if the CPU updated nothing.
        grad_norm: the unscaled gradient's norm; None if the host did not wait for it.
        clip_coefficient: 1.0 if clipping did not act; None as above.
        skipped: whether it was skipped: for an inf or NaN, or because zero_grad() left nothing.
        to_host_bytes_per_second, to_device_bytes_per_second: rates of the copies of gradients and
            of new weights; None if there were none, or none was timed (without a GPU).
    """

    step: int
    gpu_fraction: float
    step_seconds: float
    update_seconds: float
    gradient_wait_seconds: float
    outgoing_wait_seconds: float
    issue_seconds: float
    exposed_seconds: float
    hidden_share: float
    grad_norm: float | None
    clip_coefficient: float | None
    skipped: bool
    to_host_bytes_per_second: float | None = None
    to_device_bytes_per_second: float | None = None


class StatisticsRecorder:
    """Collects a step's figures once the step is decided."""

    def __init__(self) -> None:
        self._recent: collections.deque[StepStatistics] = collections.deque(maxlen=RECENT_STEPS)
        self._last_time = time.perf_counter()

    def record(
        self, pipeline: UpdatePipeline, outcome: Outcome | None, *, step: int, gpu_fraction: float
    ) -> _C.WorkerStatistics:
        """Reads the worker's and the compute stream's figures since the last call.

        Returns:
            The worker's figures.
        """
        now = time.perf_counter()
        worker = pipeline.cpu.worker.take_statistics()
        update = worker.kernel_ns / 1e9
        exposed = pipeline.exposure.take()
        hidden = 1.0 if update <= 0.0 else min(1.0, max(0.0, 1.0 - exposed / update))
        latest = StepStatistics(
            step=step,
            gpu_fraction=gpu_fraction,
            step_seconds=now - self._last_time,
            update_seconds=update,
            gradient_wait_seconds=worker.wait_gradient_ns / 1e9,
            outgoing_wait_seconds=worker.wait_outgoing_ns / 1e9,
            issue_seconds=worker.issue_ns / 1e9,
            exposed_seconds=exposed,
            hidden_share=hidden,
            grad_norm=None if outcome is None else outcome.norm,
            clip_coefficient=None if outcome is None else outcome.coefficient,
            skipped=outcome is not None and outcome.skip,
            to_host_bytes_per_second=_rate(worker.to_host_bytes, worker.to_host_ns),
            to_device_bytes_per_second=_rate(worker.to_device_bytes, worker.to_device_ns),
        )
        self._recent.append(latest)
        self._last_time = now
        return worker

    def latest(self) -> StepStatistics:
        """The last step's figures.

        Raises:
            HyTrainError: no step has been made.
        """
        if not self._recent:
            raise HyTrainError("there are no statistics before the first engine.step()")
        return self._recent[-1]

    def recent(self) -> list[StepStatistics]:
        """The last steps' figures, oldest first."""
        return list(self._recent)


def _rate(num_bytes: int, nanoseconds: int) -> float | None:
    return num_bytes * 1e9 / nanoseconds if num_bytes and nanoseconds else None
