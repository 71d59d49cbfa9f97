"""Why k is what it is: words, tables and JSON made of decisions. No torch, no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hytrain.placement.costs import LayerCosts, StepCosts
from hytrain.placement.history import UNSTEADY_STEPS, History, Median, moves_layers
from hytrain.placement.memory import Bounds, bounds, gpu_peak_bytes, host_bytes, table
from hytrain.placement.prediction import predict
from hytrain.placement.records import Decision

# Rows of the table of decisions; older moves are counted, not shown.
_MOST_DECISIONS = 20
_GIB = 1024**3

MeasuredAt = Callable[[int], "Median | None"]
"""What was measured with a number of GPU layers."""


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


def candidate_rows(decision: Decision, measured_at: MeasuredAt) -> list[CandidateRow]:
    """A row for each number of GPU layers, 0..L."""
    num_layers = decision.num_layers
    candidates = predict(decision.costs).candidates if decision.costs is not None else None
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


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Neighbouring layers of one size, with the mean of their times."""

    num_layers: int
    mean: LayerCosts


def layer_groups(costs: StepCosts) -> list[LayerGroup]:
    """Merges neighbours of equal size."""
    groups: list[list[LayerCosts]] = []
    for layer in costs.layers:
        if groups and groups[-1][0].parameters == layer.parameters:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return [LayerGroup(len(group), _mean(group)) for group in groups]


def _mean(group: Sequence[LayerCosts]) -> LayerCosts:
    first, count = group[0], len(group)
    return replace(
        first,
        name=first.name if count == 1 else f"{first.name} .. {group[-1].name}",
        forward=sum(layer.forward for layer in group) / count,
        backward=sum(layer.backward for layer in group) / count,
        to_host=sum(layer.to_host for layer in group) / count,
        cpu_update=sum(layer.cpu_update for layer in group) / count,
        cpu_commit=sum(layer.cpu_commit for layer in group) / count,
        cpu_preview=sum(layer.cpu_preview for layer in group) / count,
        to_device=sum(layer.to_device for layer in group) / count,
        gpu_update=sum(layer.gpu_update for layer in group) / count,
    )


# -- a run -------------------------------------------------------------------------------------


def explained(history: History) -> Decision:
    """The newest decision, with the newest costs: what tables and chart are made of."""
    newest, measured = history.newest, history.newest_measured
    if newest.costs is not None or measured is None:
        return newest
    return replace(newest, costs=measured.costs, closed_form_k=measured.closed_form_k)


def explain_run(history: History) -> str:
    """All about a run, for people."""
    decision = explained(history)
    parts = [_newest_words(history), f"Decisions\n\n{_history_table(history)}"]
    if decision.costs is None:
        parts.append("Measured\n\nNothing yet: the newest decision knows sizes only, no times.")
    else:
        parts.append(f"Measured\n\n{costs_text(decision.costs)}")
    parts.append(f"Candidates\n\n{candidates_text(candidate_rows(decision, history.measured_at))}")
    parts.append(f"Memory of the choice\n\n{memory_text(decision, [decision.gpu_layers_target])}")
    return "\n\n".join(parts)


def run_json(history: History) -> dict[str, Any]:
    """All about a run, as plain JSON values."""
    decision = explained(history)
    return {
        "kind": "metrics",
        "rank": history.rank,
        "num_ranks": len(history.ranks),
        "decisions": [
            _decision_json(d, history.measured_after(i)) for i, d in enumerate(history.decisions)
        ],
        **decision_json(decision, history.measured_at, [decision.gpu_layers_target]),
    }


def decision_json(
    decision: Decision, measured_at: MeasuredAt, memory_of: Sequence[int]
) -> dict[str, Any]:
    """One decision's costs, candidates and memory, as plain JSON values."""
    rows = candidate_rows(decision, measured_at)
    return {
        "num_layers": decision.num_layers,
        "gpu_layers": decision.gpu_layers_target,
        "closed_form_gpu_layers": closed_form_layers(decision),
        "reason": decision.reason,
        "costs": None if decision.costs is None else _costs_json(decision.costs),
        "candidates": [asdict(row) for row in rows],
        "bounds": asdict(fitting_bounds(decision)),
        "limits": asdict(decision.limits),
        "staging_bytes": decision.staging_bytes,
        "memory": [
            {
                "gpu_layers": number,
                "gpu_bytes": rows[number].gpu_bytes,
                "host_bytes": rows[number].host_bytes,
                "fits": rows[number].fits,
            }
            for number in memory_of
        ],
    }


def _decision_json(decision: Decision, measured: Median | None) -> dict[str, Any]:
    return {
        "step": decision.step,
        "gpu_layers_before": decision.gpu_layers_before,
        "gpu_layers_target": decision.gpu_layers_target,
        "predicted_seconds": decision.predicted_seconds,
        "measured_seconds": None if measured is None else measured.seconds,
        "measured_steps": 0 if measured is None else measured.num_steps,
        "reason": decision.reason,
    }


def _costs_json(costs: StepCosts) -> dict[str, Any]:
    return {
        "groups": [
            {"num_layers": group.num_layers, **asdict(group.mean)} for group in layer_groups(costs)
        ],
        "forward_seconds": costs.forward_seconds,
        "backward_seconds": costs.backward_seconds,
        "between_seconds": costs.between,
        "tail_seconds": costs.tail,
        "compute_seconds": costs.compute_seconds,
        "cpu_seconds": costs.cpu_seconds,
        "alpha": costs.alpha,
        "clipped_share": costs.clipped_share,
    }


def _newest_words(history: History) -> str:
    newest, num_layers = history.newest, history.newest.num_layers
    target = newest.gpu_layers_target
    when = f"After step {newest.step}" if newest.step else "Before the first step"
    place = f"{target} of {num_layers} layers on the GPU (k = {target / num_layers:.3g})"
    lines: list[str] = []
    if len(history.ranks) > 1:
        lines.append(f"Rank {history.rank} of the {len(history.ranks)} that wrote decisions.")
    if moves_layers(newest):
        lines.append(f"{when}: from {newest.gpu_layers_before} to {place}.")
    else:
        lines.append(f"{when}: stays at {place}.")
    lines.append(f"Reason: {newest.reason}.")
    lines.append(f"{_outcome(newest, history.measured_after(len(history.decisions) - 1))}.")
    move = history.last_move
    if move is not None and move is not newest:
        lines.append(
            f"The last move was after step {move.step}: from {move.gpu_layers_before} to "
            f"{move.gpu_layers_target} layers."
        )
    return "\n".join(lines)


def _outcome(decision: Decision, measured: Median | None) -> str:
    predicted = decision.predicted_seconds
    words = "Predicted: nothing, since nothing had been measured"
    if predicted is not None:
        words = f"Predicted: {predicted:.3f} s a step"
    if measured is None:
        return (
            f"{words}; not measured yet: no step with that k, or only the first "
            f"{UNSTEADY_STEPS} after the change, which do not count"
        )
    of = f" (median of {measured.num_steps} steps)" if measured.num_steps else ""
    words = f"{words}; measured afterwards: {measured.seconds:.3f} s{of}"
    if predicted is None or measured.seconds <= 0.0:
        return words
    error = predicted / measured.seconds - 1.0
    return f"{words}; the prediction was {abs(error):.1%} too {'high' if error > 0 else 'low'}"


def _history_table(history: History) -> str:
    last = len(history.decisions) - 1
    shown = [
        i for i, d in enumerate(history.decisions) if moves_layers(d) or i in (0, last)
    ]  # what decided to stay says nothing new
    left_out = len(history.decisions) - len(shown)
    older = shown[:-_MOST_DECISIONS]
    rows = [("step", "from", "to", "predicted s", "measured s", "reason")]
    for index in shown[-_MOST_DECISIONS:]:
        decision, measured = history.decisions[index], history.measured_after(index)
        rows.append(
            (
                str(decision.step),
                str(decision.gpu_layers_before),
                str(decision.gpu_layers_target),
                _seconds(decision.predicted_seconds),
                _seconds(None if measured is None else measured.seconds),
                decision.reason,
            )
        )
    text = _columns(rows, left=(5,))
    if left_out:
        text += f"\n({left_out} more that moved nothing)"
    if older:
        text += f"\n({len(older)} older ones)"
    return text


# -- tables ------------------------------------------------------------------------------------


def costs_text(costs: StepCosts) -> str:
    """What the layers take, neighbours of equal size in one line."""
    lines = ["a layer's mean, on this rank (sizes are of its shard):"]
    for group in layer_groups(costs):
        mean = group.mean
        times = [
            ("forward", mean.forward),
            ("backward", mean.backward),
            ("CPU update", mean.cpu_update),
            ("GPU update", mean.gpu_update),
            ("D2H", mean.to_host),
            ("H2D", mean.to_device),
        ]
        if costs.clipped_share > 0.0:
            times += [("clipped: commit", mean.cpu_commit), ("preview", mean.cpu_preview)]
        words = ", ".join(f"{name} {_milliseconds(value)}" for name, value in times)
        lines.append(f"  {group.num_layers} x {_millions(mean.parameters)}: {words}")
    lines += [
        f"t_B, backward of all layers: {costs.backward_seconds:.3f} s",
        f"t_U, CPU update of all layers: {costs.cpu_seconds:.3f} s",
        f"alpha, GPU over CPU update: {costs.alpha:.3g}",
        f"clipped share of the steps: {costs.clipped_share:.1%}",
        f"step without any update: {costs.compute_seconds:.3f} s (forward "
        f"{costs.forward_seconds:.3f}, between {costs.between:.3f}, backward "
        f"{costs.backward_seconds:.3f}, tail {costs.tail:.3f})",
    ]
    return "\n".join(lines)


def candidates_text(rows: Sequence[CandidateRow]) -> str:
    """The table of all numbers of GPU layers, with its legend; measured times where there are."""
    is_measured = any(row.measured_seconds is not None for row in rows)
    head = ["GPU layers", "k", "predicted s", "worker s", "exposed s", "bound", "GPU GiB"]
    head += ["host GiB", "fits", *(("measured s", "error") if is_measured else ()), ""]
    cells = [head]
    for row in rows:
        line = [
            str(row.gpu_layers),
            f"{row.k:.3f}",
            _seconds(row.predicted_seconds),
            _seconds(row.worker_seconds),
            _seconds(row.exposed_seconds),
            row.bound or "-",
            f"{row.gpu_bytes / _GIB:.1f}",
            f"{row.host_bytes / _GIB:.1f}",
            "yes" if row.fits else "no",
        ]
        if is_measured:
            error = "-" if row.error is None else f"{row.error:+.1%}"
            line += [_seconds(row.measured_seconds), error]
        cells.append([*line, _marks(row)])
    legend = "worker: the CPU worker is busy; exposed: compute waits for weights; bound: what the "
    legend += "step waits for"
    if is_measured:
        legend += (
            ";\nerror: predicted, with the share of clipped steps above, against measured, the "
        )
        legend += (
            "median of the steady\nsteps with that k, whenever they were and however many clipped"
        )
    return f"{_columns(cells, left=(len(head) - 1,))}\n{legend}."


def _marks(row: CandidateRow) -> str:
    marks = ["<- chosen"] if row.is_chosen else []
    if row.is_closed_form:
        marks.append("<- closed form")
    return " ".join(marks)


def memory_text(decision: Decision, gpu_layers: Sequence[int]) -> str:
    """What fits, and the bytes of some numbers of GPU layers."""
    fitting = fitting_bounds(decision)
    if fitting.fits:
        words = f"Fits: {fitting.min_gpu_layers} to {fitting.max_gpu_layers}"
        words += f" of {fitting.num_layers} layers on the GPU."
    else:
        words = f"No number of the {fitting.num_layers} layers on the GPU fits."
    cells = table(decision.layer_bytes, decision.limits, decision.staging_bytes, gpu_layers)
    return f"{words}\n{cells}"


def _columns(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M" if parameters >= 100_000 else str(parameters)
