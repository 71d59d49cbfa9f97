"""A search's result as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hytrain.formats.text_table import align
from hytrain.tools.hybrid.plan_record import HybridPlanFile, plan_record
from hytrain.tools.hybrid.problem import Problem
from hytrain.tools.hybrid.search import Result


def result_json(problem: Problem, result: Result) -> dict[str, Any]:
    """Returns what ``hytrain plan hybrid --json`` prints."""
    records = [plan_record(problem, one.plan, result.bound) for one in result.best]
    dumped = [record.model_dump(mode="json") for record in records]
    return {
        "cost": result.cost,
        "optimal": result.is_optimal,
        "bound": result.bound,
        "gap": result.gap,
        "plan": dumped[0],
        "evaluations": result.evaluations,
        "evaluations_unit": "shortest paths",
        "count": result.count,
        "count_unit": "boxes",
        "seconds": result.seconds,
        "plans": dumped,
    }


def result_text(problem: Problem, result: Result) -> str:
    """Returns the result as a table."""
    record = plan_record(problem, result.plan, result.bound)
    if result.is_optimal:
        proof = "optimal: no plan of the space costs less"
    else:
        proof = f"within {result.gap:.2%} of the optimum, which is at least {result.bound:.3f} ms"
    lines = [
        f"{result.cost:.3f} ms a step of {problem.gbs} samples, simulated from profiles; {proof}",
        f"{record.micro_batches} micro-batches; nodes in the order {_listed(record.order)}; "
        f"tensor parallel groups as fast as their {record.tp_speed} GPU",
        "",
        *align(_rows(record), left=(1, 5)),
        "",
        f"{result.seconds:.3f} s, {result.evaluations} shortest paths, {result.count} boxes",
    ]
    if len(result.best) > 1:
        lines += ["", *align(_ranking(result), left=(2, 3, 5))]
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
    """Returns the names joined, by semicolons if a name of a type has a comma of its own."""
    listed = list(names)
    return ("; " if any("," in name for name in listed) else ", ").join(listed)


def _samples(split: tuple[int, ...]) -> str:
    """Returns the samples with equal neighbours together: 2 x 12, 2 x 4."""
    runs: list[list[int]] = []
    for share in split:
        if runs and runs[-1][1] == share:
            runs[-1][0] += 1
        else:
            runs.append([1, share])
    return ", ".join(f"{count} x {share}" for count, share in runs)


def _ranking(result: Result) -> list[list[str]]:
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
