"""What a step took, where DeepSpeed's users look for it: its monitors and its line of times."""

from __future__ import annotations

from typing import Any

from hytrain.engine.deepspeed_internals import print_dist
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.optimizer.statistics import StepStatistics

PREFIX = "Train/hytrain/"


def report_step(engine: Any, optimizer: HyTrainZeroOptimizer) -> None:
    """Writes what is asked for ("tensorboard", "csv_monitor", ..., "wall_clock_breakdown").

    After a step, which may have been skipped.
    """
    is_first = int(engine.global_rank) == 0
    if is_first and engine.monitor.enabled:
        found = monitored(optimizer)
        # As DeepSpeed's own events: over the samples that the job has seen.
        engine.monitor.write_events(
            [(PREFIX + name, value, engine.global_samples) for name, value in found.items()]
        )
    if engine.wall_clock_breakdown():
        print_dist(_times(optimizer.statistics.latest()), ranks=[0])


def monitored(optimizer: HyTrainZeroOptimizer) -> dict[str, float]:
    """Figures of the last step on this rank, by name; what was not measured is left out."""
    latest = optimizer.statistics.latest()
    predicted = [
        decision.predicted_seconds
        for decision in optimizer.placement.decisions
        if decision.predicted_seconds is not None
    ]
    found: dict[str, float | None] = {
        "gpu_fraction": latest.gpu_fraction,
        "overlap_ratio": latest.hidden_share,
        "update_ms": 1e3 * latest.update_seconds,
        "exposed_update_ms": 1e3 * latest.exposed_seconds,
        "copy_to_host_gb_per_s": _gigabytes(latest.to_host_bytes_per_second),
        "copy_to_device_gb_per_s": _gigabytes(latest.to_device_bytes_per_second),
        "step_ms": 1e3 * latest.step_seconds,
        "predicted_step_ms": 1e3 * predicted[-1] if predicted else None,
        "grad_norm": latest.grad_norm,
        "clip_coefficient": latest.clip_coefficient,
        "skipped": float(latest.skipped),
    }
    return {name: value for name, value in found.items() if value is not None}


def _gigabytes(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e9


def _times(latest: StepStatistics) -> str:
    """DeepSpeed's line of its optimizer's times, with what takes their place here."""
    times = {
        "optimizer_allgather": latest.exposed_seconds,
        "optimizer_gradients": latest.gradient_wait_seconds,
        "optimizer_step": latest.update_seconds,
    }
    return "time (ms)" + "".join(f" | {name}: {1e3 * value:.2f}" for name, value in times.items())
