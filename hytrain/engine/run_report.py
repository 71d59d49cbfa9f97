"""What rank 0 logs of a run: a line at its start, one whenever k has settled, one at its end.

Also reports what a step took where DeepSpeed's users look for it: its monitors and line of times.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import Any

from hytrain.engine.deepspeed_internals import print_dist
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import size_text
from hytrain.formats.moment_kinds import SPLIT
from hytrain.optimizer.statistics import StepStatistics
from hytrain.placement.costs import counted, layers_words
from hytrain.placement.memory import host_state_bytes, state_bytes
from hytrain.placement.records import Decision
from hytrain.version import __version__

_WARMUP_STEPS = 3
"""First steps that a summary leaves out: allocators, calibration and threads start in them."""
_QUIET_STEPS = 8
"""Steps without a decision until k is settled: the first one is often followed by another."""

logger = logging.getLogger("hytrain.run")


class RunReport:
    """Logs one engine's lines with the logger "hytrain.run"."""

    def __init__(self, engine: Any, optimizer: HyTrainZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._told: int | None = None
        logger.info("%s", start_line(engine, optimizer))

    def after_step(self, step: int) -> None:
        """Logs k and its reason if the solver has settled anew; ``step``: number of steps made."""
        placement = self._optimizer.placement
        controller, last = placement.controller, placement.decisions[-1]
        if (
            last.gpu_layers_target == self._told
            or last.costs is None
            or not controller.moves.is_settled
        ):
            return
        if step < last.step + _QUIET_STEPS:
            return
        self._told = last.gpu_layers_target
        if controller.solves:
            k = _share(last.gpu_layers_target, last.num_layers)
            logger.info("hytrain: k = %s after step %d: %s", k, last.step, _because(last))

    def close(self) -> None:
        """Logs the summary if steps were made."""
        recent = self._optimizer.statistics.recent()
        # The times of other steps include another k's updates.
        steps = [step for step in recent if step.gpu_fraction == recent[-1].gpu_fraction]
        steps = steps[_WARMUP_STEPS:] or steps
        if steps:
            num_layers = self._optimizer.placement.decisions[-1].num_layers
            logger.info("%s", _summary(steps, num_layers))


class _Named(logging.Formatter):
    """Begins every line with "hytrain": it stands among those of other libraries."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        record.named = text if text.startswith("hytrain") else f"hytrain: {text}"
        return super().format(record)


def show_lines() -> None:
    """Shows a run's lines and all warnings, with the script's handlers if it has any.

    logging hides INFO lines by default. They appear unless the script set a level for
    "hytrain" or "hytrain.run".
    """
    package = logging.getLogger("hytrain")
    if logger.level == logging.NOTSET and package.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not package.hasHandlers():
        handler = logging.StreamHandler()
        # In a terminal a progress bar's line is overwritten: it is drawn again below.
        start = "\r\033[K" if handler.stream.isatty() else ""
        handler.setFormatter(_Named(f"{start}%(named)s"))
        package.addHandler(handler)


def start_line(engine: Any, optimizer: HyTrainZeroOptimizer) -> str:
    """Returns the lines that rank 0 logs when an engine is built."""
    first = optimizer.placement.decisions[0]
    parameters = sum(slot.numel for state in optimizer.layer_states for slot in state.layout.slots)
    ranks = int(engine.world_size)
    on_gpu = state_bytes(first.layer_bytes[: first.gpu_layers_target])
    on_host = host_state_bytes(first.layer_bytes[first.gpu_layers_target :])
    k = "solved while training" if optimizer.placement.controller.solves else "fixed"
    what = "optimizer" if any(layer.is_streamed for layer in first.layer_bytes) else "Adam"
    kind = f"{first.layer_bytes[0].moments} moments"
    if first.layer_bytes[0].master == SPLIT:
        kind = f"split master weights, {kind}"
    peak = optimizer.placement.memory_peaks()["step"]
    planned = f"{size_text(peak.resident)} of host memory"
    if first.limits.host_base:
        planned += f", {size_text(first.limits.host_base)} of offloaded activations beside it"
    where = f"{size_text(on_host)} in host memory, {size_text(on_gpu)} on the GPU"
    if peak.gpu is None:
        where = f"{size_text(on_gpu + on_host)}; no accelerator: everything is on the CPU"
    else:
        planned += f" and, besides activations, {size_text(peak.gpu)} of the GPU's"
    if first.host_master_reason:
        planned += f"; {first.host_master_reason}"
    shared = ""
    if engine.sequence_parallel_size > 1:
        shared = f"; {engine.sequence_parallel_size} ranks share each sequence"
    return (
        f"hytrain {__version__}: {_count(parameters)} trained parameters in "
        f"{layers_words(first.layer_bytes)}, ZeRO-{int(engine.zero_optimization_stage())}"
        f"{shared}; k = {_share(first.gpu_layers_target, first.num_layers)}, {k}\n"
        f"hytrain: {'' if ranks == 1 else f'rank 0 of {ranks}: '}{what} state "
        f"({kind}) {where}; planned: at most {planned}"
    )


def _summary(steps: list[StepStatistics], num_layers: int) -> str:
    def median(value: Callable[[StepStatistics], float]) -> float:
        return statistics.median(value(step) for step in steps)

    update = sum(step.update_seconds for step in steps)
    exposed = sum(step.exposed_seconds for step in steps)
    # The last decision's layers may not have moved yet.
    k = _share(round(steps[-1].gpu_fraction * num_layers), num_layers)
    text = (
        f"hytrain: {steps[-1].step} steps; median of {len(steps)}: "
        f"{1e3 * median(lambda step: step.step_seconds):.1f} ms with k = {k}"
    )
    if update <= 0.0:
        return f"{text}, no CPU updates"
    hidden = min(1.0, max(0.0, 1.0 - exposed / update))
    return text + (
        f"; CPU update {1e3 * median(lambda step: step.update_seconds):.1f} ms, "
        f"{hidden:.0%} hidden, {1e3 * median(lambda step: step.exposed_seconds):.1f} ms exposed"
    )


def _share(layers: int, num_layers: int) -> str:
    return f"{layers / num_layers:.2f} ({layers} of {counted(num_layers, 'layer')})"


def _because(decision: Decision) -> str:
    # The number of layers and the prediction follow after the reason's first clause.
    return decision.reason.split("; ")[0]


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:,}"


PREFIX = "Train/hytrain/"


def report_step(engine: Any, optimizer: HyTrainZeroOptimizer) -> None:
    """Writes what is configured ("tensorboard", "csv_monitor", ..., "wall_clock_breakdown").

    Called after a step, which may have been skipped.
    """
    is_first = int(engine.global_rank) == 0
    if is_first and engine.monitor.enabled:
        found = monitored(optimizer)
        # Like DeepSpeed's own events, over the samples that the job has seen.
        engine.monitor.write_events(
            [(PREFIX + name, value, engine.global_samples) for name, value in found.items()]
        )
    if engine.wall_clock_breakdown():
        print_dist(_times(optimizer.statistics.latest()), ranks=[0])


def monitored(optimizer: HyTrainZeroOptimizer) -> dict[str, float]:
    """Returns this rank's figures of the last step, by name; unmeasured ones are left out."""
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
    """Returns DeepSpeed's line of optimizer times, with the times that correspond to them here."""
    times = {
        "optimizer_allgather": latest.exposed_seconds,
        "optimizer_gradients": latest.gradient_wait_seconds,
        "optimizer_step": latest.update_seconds,
    }
    return "time (ms)" + "".join(f" | {name}: {1e3 * value:.2f}" for name, value in times.items())
