"""The numbers of GPU layers that a decision chose from: predicted, measured, and what fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hytrain.placement.memory import Bounds, bounds, gpu_peak_bytes, host_bytes
from hytrain.placement.prediction import Candidate, predict
from hytrain.placement.records import Decision
from hytrain.tools.explain.history import Median

MeasuredAt = Callable[[int], "Median | None"]
"""What was measured with a number of GPU layers."""


def not_measured(gpu_layers: int) -> Median | None:
    """Of an estimate: no step was made."""
    del gpu_layers


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One number of GPU layers: predicted, measured, and whether it fits.

    Attributes:
        gpu_layers: K.
        k: its share of all layers.
        predicted_seconds: the step; None where nothing has been measured to predict it from.
        worker_seconds: of it, the CPU worker is busy.
        exposed_seconds: of it, compute stands still for weights.
        bound: what the step waits for, "host" or "gpu".
        gpu_bytes: the GPU's peak.
        host_bytes: what the host holds.
        fits: whether both fit, with the reserves.
        measured_seconds: median of the steady steps at this number; None where none ran.
        measured_steps: how many those were.
        error: predicted over measured, less 1.
        is_chosen: the decision's target; no row's where nothing fits.
        is_closed_form: the closed form's number, as far as it fits.
    """

    gpu_layers: int
    k: float
    predicted_seconds: float | None
    worker_seconds: float | None
    exposed_seconds: float | None
    bound: str | None
    gpu_bytes: int
    host_bytes: int
    fits: bool
    measured_seconds: float | None
    measured_steps: int
    error: float | None
    is_chosen: bool
    is_closed_form: bool


def candidate_rows(
    decision: Decision, measured_at: MeasuredAt = not_measured
) -> list[CandidateRow]:
    """A row for each number of GPU layers, 0..L."""
    num_layers = decision.num_layers
    candidates = _predicted(decision)
    closed, fitting = closed_form_layers(decision), fitting_bounds(decision)
    rows: list[CandidateRow] = []
    for number in range(num_layers + 1):
        candidate = candidates[number] if candidates is not None else None
        measured = measured_at(number)
        error = None
        if candidate is not None and measured is not None and measured.seconds > 0.0:
            error = candidate.step_seconds / measured.seconds - 1.0
        rows.append(
            CandidateRow(
                gpu_layers=number,
                k=number / num_layers,
                predicted_seconds=None if candidate is None else candidate.step_seconds,
                worker_seconds=None if candidate is None else candidate.worker_seconds,
                exposed_seconds=None if candidate is None else candidate.exposed_seconds,
                bound=None if candidate is None else candidate.bound,
                gpu_bytes=gpu_peak_bytes(decision.layer_bytes, decision.limits, number),
                host_bytes=host_bytes(decision.layer_bytes, number, decision.staging_bytes),
                fits=fitting.allow(number),
                measured_seconds=None if measured is None else measured.seconds,
                measured_steps=0 if measured is None else measured.num_steps,
                error=error,
                is_chosen=number == decision.gpu_layers_target and decision.bounds.fits,
                is_closed_form=number == closed,
            )
        )
    return rows


def _predicted(decision: Decision) -> list[Candidate] | None:
    """As the decision saw them, what measured steps add included; None before any measurement."""
    if decision.costs is None:
        return None
    candidates = predict(decision.costs).candidates
    added = decision.corrections or (0.0,) * len(candidates)
    pairs = zip(candidates, added, strict=True)
    return [replace(c, step_seconds=c.step_seconds + seconds) for c, seconds in pairs]


def fitting_bounds(decision: Decision) -> Bounds:
    """What fits; worked out where the decision did not ask, as with a fixed ``gpu_fraction``."""
    if decision.bounds != Bounds.unlimited(decision.num_layers):
        return decision.bounds
    return bounds(decision.layer_bytes, decision.limits, decision.staging_bytes)


def closed_form_layers(decision: Decision) -> int | None:
    """The closed form's number of GPU layers, moved to the nearest that fits where one does."""
    if decision.closed_form_k is None:
        return None
    number = math.floor(decision.closed_form_k * decision.num_layers + 0.5)
    return decision.bounds.clamp(number) if decision.bounds.fits else number
