"""A search's result for people: a table, JSON, and a picture of the pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hytrain.formats.text_table import align
from hytrain.tools.hybrid.plan_record import HybridPlanFile, plan_record
from hytrain.tools.hybrid.problem import Problem
from hytrain.tools.hybrid.search import Result
from hytrain.tools.pictures import picture

EVALUATIONS = {
    "exact": "shortest paths",
    "metis": "plans costed",
    "metis-improved": "plans costed",
}
"""The unit of ``Result.evaluations``, by method."""

COUNTS = {
    "exact": "boxes",
    "metis": "moves and failed partitions",
    "metis-improved": "moves and failed partitions",
}
"""That of ``Result.count``."""

_MOST_DRAWN = 16
"""Micro-batches of a picture."""


def result_json(problem: Problem, result: Result, method: str) -> dict[str, Any]:
    """What ``hytrain plan hybrid --json`` prints."""
    records = [plan_record(problem, one.plan, result.bound) for one in result.best]
    dumped = [record.model_dump(mode="json") for record in records]
    return {
        "method": method,
        "cost": result.cost,
        "optimal": result.is_optimal,
        "bound": result.bound,
        "gap": result.gap,
        "plan": dumped[0],
        "evaluations": result.evaluations,
        "evaluations_unit": EVALUATIONS[method],
        "count": result.count,
        "count_unit": COUNTS[method],
        "seconds": result.seconds,
        "plans": dumped,
    }


def result_text(problem: Problem, result: Result, method: str) -> str:
    """The same as a table."""
    record = plan_record(problem, result.plan, result.bound)
    if result.is_optimal:
        proof = "optimal: no plan of the space costs less"
    elif result.bound > 0:
        proof = f"within {result.gap:.2%} of the optimum, which is at least {result.bound:.3f} ms"
    else:
        proof = "nothing is known about better plans: this search has no bound"
    lines = [
        f"{result.cost:.3f} ms a step of {problem.gbs} samples, simulated from profiles; {proof}",
        f"{record.micro_batches} micro-batches; nodes in the order {_listed(record.order)}; "
        f"tensor parallel groups as fast as their {record.tp_speed} GPU",
        "",
        *align(_rows(record), left=(1, 5)),
        "",
        f"{method}: {result.seconds:.3f} s, {result.evaluations} {EVALUATIONS[method]}, "
        f"{result.count} {COUNTS[method]}",
    ]
    if len(result.best) > 1:
        lines += ["", *align(_ranking(problem, result), left=(2, 3, 5))]
    return "\n".join(lines)


def _rows(record: HybridPlanFile) -> list[list[str]]:
    rows = [["stage", "GPUs", "layers", "dp", "tp", "samples", "ms", "memory, GB", "state on"]]
    for number, stage in enumerate(record.stages):
        rows.append(
            [
                str(number),
                _listed(f"{count} {name}" for name, count in stage.devices.items()),
                f"{stage.first_layer} to {stage.stop_layer - 1}",
                str(stage.dp),
                str(stage.tp),
                _samples(stage.samples),
                f"{stage.time_ms:.2f}",
                f"{stage.memory_mb / 1024:.1f} of {stage.capacity_mb / 1024:.0f}",
                "host" if stage.optimizer_on_host else "GPU",
            ]
        )
    return rows


def _listed(names: Iterable[str]) -> str:
    """Names of types may have commas of their own."""
    listed = list(names)
    return ("; " if any("," in name for name in listed) else ", ").join(listed)


def _samples(split: tuple[int, ...]) -> str:
    """Equal neighbours together: 2 x 12, 2 x 4."""
    runs: list[list[int]] = []
    for share in split:
        if runs and runs[-1][1] == share:
            runs[-1][0] += 1
        else:
            runs.append([1, share])
    return ", ".join(f"{count} x {share}" for count, share in runs)


def _ranking(problem: Problem, result: Result) -> list[list[str]]:
    rows = [["plan", "ms", "order", "groups", "micro-batches", "dp x tp"]]
    for number, one in enumerate(result.best, start=1):
        plan = one.plan
        rows.append(
            [
                str(number),
                f"{one.cost:.3f}",
                _listed(plan.order),
                ", ".join(map(str, plan.groups)),
                str(plan.micro_batches),
                ", ".join(f"{dp} x {tp}" for dp, tp in plan.strategies),
            ]
        )
    return rows


def draw_pipeline(path: Path, record: HybridPlanFile) -> None:
    """Writes a PNG: when each stage has which micro-batch, and what follows the last one.

    Args:
        path: the file; replaced.
        record: the plan.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    height = 2.2 + 0.45 * len(record.stages)
    with picture(path, (11, height), flag="--png", without="leave --png out") as figure:
        axes: Any = figure.subplots()
        shown = min(record.micro_batches, _MOST_DRAWN)
        ends = _draw_micro_batches(axes, record, shown)
        finish = max(ends)
        update = max(stage.update_ms for stage in record.stages)
        gradients = max(stage.gradients_ms for stage in record.stages)
        # Drawn to scale with what is shown, after the last micro-batch's end.
        lanes = range(len(record.stages))
        axes.barh(lanes, gradients, left=finish, color="tab:orange", label="gradients", height=0.8)
        left = finish + gradients
        axes.barh(lanes, update, left=left, color="tab:green", label="optimizer", height=0.8)
        axes.set_yticks(lanes, [_lane(number, record) for number in lanes], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("ms, simulated from profiles; forward and backward of a micro-batch as one")
        count = record.micro_batches
        part = "" if shown == count else f", the first {shown} of {count} micro-batches drawn"
        outside = record.cost_ms - (left + update)
        part = part or f", {outside:.1f} ms of it outside of the stages (synchronisation, input)"
        axes.set_title(f"{record.cost_ms:.1f} ms a step{part}", fontsize=10)
        axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(1.0, 0.0))
        axes.grid(alpha=0.3, axis="x")


def _draw_micro_batches(axes: Any, record: HybridPlanFile, shown: int) -> list[float]:
    """Each stage begins when it is free and the stage before has sent; its last end."""
    ready = [0.0] * shown
    ends: list[float] = []
    for number, stage in enumerate(record.stages):
        free = 0.0
        starts: list[float] = []
        for one in range(shown):
            starts.append(max(free, ready[one]))
            free = starts[-1] + stage.time_ms
            ready[one] = free + stage.send_ms
        colors = [f"C{one % 2 * 9}" for one in range(shown)]
        label = "micro-batch" if number == 0 else None
        axes.barh(
            [number] * shown,
            [stage.time_ms] * shown,
            left=starts,
            color=colors,
            edgecolor="white",
            height=0.8,
            label=label,
        )
        if shown <= 8:
            for one, start in enumerate(starts):
                axes.text(start + stage.time_ms / 2, number, str(one), ha="center", va="center")
        ends.append(free)
    return ends


def _lane(number: int, record: HybridPlanFile) -> str:
    stage = record.stages[number]
    devices = " + ".join(f"{count} {name}" for name, count in stage.devices.items())
    where = ", state on host" if stage.optimizer_on_host else ""
    layers = f"layers {stage.first_layer} to {stage.stop_layer - 1}"
    return f"{number}: {devices}\n{layers}, dp {stage.dp} x tp {stage.tp}{where}"
