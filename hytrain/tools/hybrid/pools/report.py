"""A plan over pools for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hytrain.formats.text_table import align
from hytrain.tools.hybrid.pools.cost import (
    compute_seconds,
    micro_batches,
    stage_memory_bytes,
    transfer_seconds,
)
from hytrain.tools.hybrid.pools.problem import Plan, Problem
from hytrain.tools.hybrid.pools.schedule import schedule_seconds
from hytrain.tools.hybrid.pools.search import Result


def result_json(problem: Problem, result: Result) -> dict[str, Any]:
    """What ``hytrain plan pools --json`` prints: ``cost`` and ``bound`` in seconds of a step."""
    return {
        "cost": result.cost,
        "optimal": result.optimal,
        "bound": result.bound,
        "schedule_seconds": schedule_seconds(problem, result.plan),
        "simulated": True,
        "batch": problem.batch,
        "plan": _plan_json(problem, result.plan),
        "evaluations": result.evaluations,
        "evaluations_unit": "plans costed",
        "count": result.labels,
        "count_unit": "pipelines begun",
        "seconds": result.seconds,
        "found_after_seconds": result.best_after,
    }


def _plan_json(problem: Problem, plan: Plan) -> dict[str, Any]:
    stages: list[dict[str, Any]] = []
    for index, stage in enumerate(plan.stages):
        replicas: list[dict[str, Any]] = []
        for one in stage.replicas:
            pool = problem.pools[one.pool]
            memory = stage_memory_bytes(
                problem, one.tp, stage.start, stage.stop, plan.micro_batch, len(plan.stages) - index
            )
            replicas.append(
                {
                    "device": pool.device,
                    "zone": pool.zone,
                    "tp": one.tp,
                    "count": one.count,
                    "memory_gib": memory / 2**30,
                    "capacity_gib": pool.memory_bytes / 2**30,
                }
            )
        stages.append(
            {
                "first_layer": stage.start,
                "stop_layer": stage.stop,
                "compute_ms": 1e3 * compute_seconds(problem, stage, plan.micro_batch),
                "transfer_ms": 1e3 * transfer_seconds(problem, plan, index),
                "replicas": replicas,
            }
        )
    return {
        "micro_batch": plan.micro_batch,
        "micro_batches": micro_batches(problem, plan),
        "dp": plan.dp,
        "stages": stages,
        "unused_gpus": {
            f"{pool.device} {pool.zone}": pool.gpus - used
            for pool, used in zip(problem.pools, plan.used(len(problem.pools)), strict=True)
        },
    }


def text_of(values: Mapping[str, Any]) -> str:
    """The values of :func:`result_json` as a table."""
    plan, cost, bound = values["plan"], values["cost"], values["bound"]
    if values["optimal"]:
        proof = "optimal: no plan of the space takes less"
    else:
        above = cost / bound - 1
        proof = f"no plan takes less than {bound:.4f} s, so this one is at most {above:.0%} longer"
    rows = [["stage", "layers", "replicas", "compute, ms", "transfers, ms", "GiB"]]
    for number, stage in enumerate(plan["stages"]):
        drawn = stage["replicas"]
        rows.append(
            [
                str(number),
                f"{stage['first_layer']} to {stage['stop_layer'] - 1}",
                "; ".join(
                    f"{one['count']} x tp {one['tp']}, {one['device']} {one['zone']}"
                    for one in drawn
                ),
                f"{stage['compute_ms']:.2f}",
                f"{stage['transfer_ms']:.2f}",
                ", ".join(f"{one['memory_gib']:.1f} of {one['capacity_gib']:.0f}" for one in drawn),
            ]
        )
    unused = [f"{count} {name}" for name, count in plan["unused_gpus"].items() if count]
    return "\n".join(
        [
            f"{cost:.4f} s a step of {values['batch']} samples, simulated from profiles; {proof}",
            f"data parallel {plan['dp']} in every stage, {plan['micro_batches']} micro-batches of "
            f"{plan['micro_batch']} on each; played through 1F1B: "
            f"{values['schedule_seconds']:.4f} s",
            "",
            *align(rows, left=(1, 2, 5)),
            "",
            f"GPUs not used: {', '.join(unused) or 'none'}",
            f"searched for {values['seconds']:.2f} s, found after "
            f"{values['found_after_seconds']:.2f} s",
        ]
    )
