"""The numbers of GPU layers that a decision chose from: predicted, measured, and what fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hytrain.cost.prediction import predict
from hytrain.placement.memory import as_kept, gpu_peak_bytes, gradient_room, host_bytes
from hytrain.placement.records import Decision
from hytrain.tools.explain.history import Median

MISFIT = 0.25
"""Largest usual error, predicted over measured less 1. On GPUs predictions far from the solved k
were off by up to 16 % (experiments/solve_k)."""
_MARKS = {"user": "fixed", "start": "first step", "training": "chosen"}
_STEPS = 5
"""A median of fewer is not compared with a prediction: it may be an evaluation or a save."""


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One number of GPU layers: predicted, measured, and whether it fits.

    Attributes:
        gpu_layers: the number, K.
        predicted_seconds: the step; None if nothing has been measured to predict it from.
        worker_seconds: the part of it in which the CPU worker is busy.
        exposed_seconds: the part of it in which compute waits for weights.
        bound: what the step waits for, "host" or "gpu".
        gpu_bytes: the GPU's peak.
        host_bytes: what the host holds.
        fits: whether both fit, with the reserves.
        measured: the steady steps at this number; None if none ran.
        error: predicted over measured, less 1; None if fewer than 5 steps were measured.
        marks: "chosen" for the decision's target, if any number fits ("first step" before training
            has decided, "fixed" if the user did), and "closed form" for that of the closed form.
    """

    gpu_layers: int
    predicted_seconds: float | None
    worker_seconds: float | None
    exposed_seconds: float | None
    bound: str | None
    gpu_bytes: int
    host_bytes: int
    fits: bool
    measured: Median | None
    error: float | None
    marks: tuple[str, ...]


def candidate_rows(
    decision: Decision, measured_at: Callable[[int], Median | None]
) -> list[CandidateRow]:
    """A row for each number of GPU layers, 0..L, with what was measured with it."""
    numbers = range(decision.num_layers + 1)
    candidates = None
    if decision.costs is not None:
        room = partial(gradient_room, decision.layer_bytes, decision.limits)
        candidates = predict(decision.costs, room=room).candidates
    # What measured steps add to the predictions, as the decision saw them.
    added = decision.corrections or (0.0,) * len(numbers)
    marked = {"closed form": closed_form_layers(decision)}
    if decision.bounds.fits or decision.decider == "user":
        marked = {_MARKS[decision.decider]: decision.gpu_layers_target, **marked}
    rows: list[CandidateRow] = []
    for number in numbers:
        one = None if candidates is None else candidates[number]
        predicted = None if one is None else one.step_seconds + added[number]
        measured = measured_at(number)
        error = None
        is_known = measured is not None and measured.num_steps >= _STEPS and measured.seconds > 0.0
        if predicted is not None and measured is not None and is_known:
            error = predicted / measured.seconds - 1.0
        rows.append(
            CandidateRow(
                gpu_layers=number,
                predicted_seconds=predicted,
                worker_seconds=None if one is None else one.worker_seconds,
                exposed_seconds=None if one is None else one.exposed_seconds,
                bound=None if one is None else one.bound,
                gpu_bytes=gpu_peak_bytes(decision.layer_bytes, decision.limits, number),
                host_bytes=_host_bytes(decision, number),
                fits=decision.bounds.allow(number),
                measured=measured,
                error=error,
                marks=tuple(mark for mark, its in marked.items() if its == number),
            )
        )
    return rows


def _host_bytes(decision: Decision, gpu_layers: int) -> int:
    taken = decision.staging_bytes + decision.save_bytes
    layers = as_kept(decision.layer_bytes, decision.limits, taken, gpu_layers)
    return host_bytes(layers, gpu_layers, decision.staging_bytes)


def worst_misfit(rows: Sequence[CandidateRow]) -> CandidateRow | None:
    """The row with the largest error, if that is above :data:`MISFIT`; else None."""
    errors = {abs(row.error): row for row in rows if row.error is not None}
    worst = max(errors, default=0.0)
    return errors[worst] if worst > MISFIT else None


def closed_form_layers(decision: Decision) -> int | None:
    """The closed form's number of GPU layers, moved to the nearest that fits if one does."""
    if decision.closed_form_k is None:
        return None
    number = math.floor(decision.closed_form_k * decision.num_layers + 0.5)
    return decision.bounds.clamp(number) if decision.bounds.fits else number
