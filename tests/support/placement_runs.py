"""Metrics files with placement decisions, made by hand, for tests of their explanation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.placement.choose_gpu_layers import solve
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import bounds
from hytrain.placement.records import Decision

GIB = 1024**3
SIZES = (98_000_000, *[113_000_000] * 24, 99_000_000)
NUM_LAYERS = len(SIZES)


def costs(clipped_share: float = 0.0) -> StepCosts:
    """Costs of a step with 0.35 s of compute and 0.58 s of CPU update."""
    layers = [
        LayerCosts(
            name=f"layer {number}",
            parameters=size,
            forward=0.0044,
            backward=0.0089,
            to_host=2 * size / 55e9,
            cpu_update=size / 5e9,
            cpu_commit=size / 6e9,
            cpu_preview=size / 9e9,
            to_device=2 * size / 55e9,
            gpu_update=size / 150e9,
        )
        for number, size in enumerate(SIZES)
    ]
    return StepCosts(tuple(layers), clipped_share=clipped_share)


def decision(
    step: int,
    before: int,
    target: int,
    *,
    measured: StepCosts | None = None,
    gpu_gib: int = 60,
    measured_seconds: float | None = None,
) -> Decision:
    """A decision that measured costs led to; without them, that of a run's start."""
    layers = tuple(LayerBytes(f"layer {n}", size) for n, size in enumerate(SIZES))
    limits = MemoryLimits(gpu_gib * GIB, 4 * GIB, 34 * GIB, 128 * GIB, 4 * GIB)
    fit = bounds(layers, limits, 2 * GIB)
    solution = None if measured is None else solve(measured, "pipeline", fit)
    return Decision(
        step=step,
        gpu_layers_before=before,
        gpu_layers_target=target,
        num_layers=NUM_LAYERS,
        reason="nothing measured yet" if solution is None else solution.reason,
        decider="start" if solution is None else "training",
        predicted_seconds=None if solution is None else solution.predictions[target].step_seconds,
        measured_seconds=measured_seconds,
        closed_form_k=None if solution is None else solution.closed_form_k,
        bounds=fit,
        costs=measured,
        layer_bytes=layers,
        limits=limits,
        staging_bytes=2 * GIB,
    )


def step_line(step: int, seconds: float, gpu_layers: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.5, "step_s": seconds, "k": gpu_layers / NUM_LAYERS}


def text_of(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def typical_run(clipped_share: float = 0.0) -> list[dict[str, Any]]:
    """Ten steps of 0.55 s at 0 GPU layers, ten at 13 of 26: three of 9 s, the rest of 0.35 s."""
    records: list[dict[str, Any]] = [decision(0, 0, 0).metrics_record()]
    records += [step_line(n, 0.55, 0) for n in range(1, 11)]
    records.append(decision(10, 0, 13, measured=costs(clipped_share)).metrics_record())
    records += [step_line(n, 9.0 if n < 14 else 0.35, 13) for n in range(11, 21)]
    records.append({"step": 20, "eval_loss": 2.0})
    return records
