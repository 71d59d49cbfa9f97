"""A run's decisions and what came of them, for people and as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hytrain.formats.text_table import align
from hytrain.placement.records import Decision
from hytrain.tools.explain.candidates import (
    candidate_rows,
)
from hytrain.tools.explain.decision_report import (
    candidates_text,
    costs_text,
    decision_json,
    memory_text,
    seconds_text,
)
from hytrain.tools.explain.history import UNSTEADY_STEPS, History, Median, moves_layers

# Rows of the table of decisions; older moves are counted, not shown.
_MOST_DECISIONS = 20


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
                seconds_text(decision.predicted_seconds),
                seconds_text(None if measured is None else measured.seconds),
                decision.reason,
            )
        )
    text = "\n".join(align(rows, left=(5,)))
    if left_out:
        text += f"\n({left_out} more that moved nothing)"
    if older:
        text += f"\n({len(older)} older ones)"
    return text
