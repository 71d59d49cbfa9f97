"""A decision, from a run or the first one of a configuration, as text and as JSON."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.formats.text_table import align
from hytrain.placement.costs import counted
from hytrain.placement.memory_report import table
from hytrain.placement.records import Decision
from hytrain.tools.explain.candidates import (
    MISFIT,
    CandidateRow,
    candidate_rows,
    closed_form_layers,
    worst_misfit,
)
from hytrain.tools.explain.history import UNSTEADY_STEPS, History, Median, moves_layers

_GIB = 1024**3
_NO_GPU = (
    'There was no GPU: what is called "GPU" below is the CPU itself. How long a step takes with a '
    "GPU, and the k that suits it, cannot be seen here."
)
_MOST_DECISIONS = 20
"""Rows of the table of decisions; older moves are counted, not shown."""


def explained(history: History) -> Decision:
    """The newest decision, with the newest costs."""
    newest = history.decisions[-1]
    measured = (d for d in reversed(history.decisions) if d.costs is not None)
    found = next(measured, newest)
    return replace(newest, costs=found.costs, closed_form_k=found.closed_form_k)


def run_text(history: History) -> str:
    """Everything about a run, as text."""
    head = ""
    if len(history.ranks) > 1:
        head = f"Rank {history.rank} of the {len(history.ranks)} that wrote decisions.\n"
    newest = explained(history)
    if newest.limits.gpu is None:
        head += f"{_NO_GPU}\n"
    found = decision_text(newest, history.measured_at)
    return f"{head}{found}\n\nDecisions\n\n{_history_table(history)}"


def decision_text(decision: Decision, measured_at: Callable[[int], Median | None]) -> str:
    """A decision's choice, costs, candidates and memory."""
    target, num_layers = decision.gpu_layers_target, decision.num_layers
    rows = candidate_rows(decision, measured_at)
    misfit = worst_misfit(rows)
    reason = f"{decision.reason}." if misfit is None else _misfit_words(rows, misfit)
    measured, columns = "", None
    if decision.costs is not None:
        measured, columns = f"Measured\n\n{costs_text(decision.costs)}\n\n", [target]
    form = decision.host_master_reason
    form = f"{form[0].upper()}{form[1:]}.\n\n" if form else ""
    return (
        f"{target} of {num_layers} layers on the GPU (k = {target / num_layers:.3g}): "
        f"{reason}\n\n"
        f"{form}"
        f"{measured}"
        f"{memory_text(decision, rows, columns)}"
    )


def memory_text(
    decision: Decision,
    rows: Sequence[CandidateRow],
    columns: Sequence[int] | None = None,
    host_weights: int = 0,
    gpu_weights: int = 0,
) -> str:
    """The table of numbers of GPU layers, and the bytes of some.

    ``columns``: of which; None: of the first, last and chosen. ``host_weights``, ``gpu_weights``:
    see :func:`~hytrain.placement.memory_report.table`.
    """
    columns = columns or sorted({0, decision.gpu_layers_target, decision.num_layers})
    sizes = decision.layer_bytes, decision.limits, decision.staging_bytes
    memory = table(
        *sizes,
        columns,
        host_weights=host_weights,
        gpu_weights=gpu_weights,
        save_bytes=decision.save_bytes,
    )
    candidates = candidates_text(rows)
    return f"Candidates\n\n{candidates}\n\nMemory\n\n{memory}"


def _misfit_words(rows: Sequence[CandidateRow], misfit: CandidateRow) -> str:
    """What replaces the solver's reason, which rests on predictions."""
    ran = [(row.measured.seconds, row) for row in rows if row.measured is not None]
    seconds, best = min(ran, key=lambda pair: pair[0])
    measured = misfit.measured and misfit.measured.seconds
    return (
        "the solver's choice.\n"
        f"The predictions do not fit this run: with {misfit.gpu_layers} layers on the GPU "
        f"{_seconds(misfit.predicted_seconds)} s predicted, {_seconds(measured)} s measured "
        f"({misfit.error:+.0%}; usual is up to {MISFIT:.0%}). Choose k by measured steps: the "
        f"shortest step is that of {best.gpu_layers} layers, {_seconds(seconds)} s. Predictions "
        "fail for steps of a few ms, batches that change their shape, and without a GPU."
    )


def decision_json(
    decision: Decision, measured_at: Callable[[int], Median | None]
) -> dict[str, Any]:
    """The decision's own record, with what follows from it, as plain JSON values."""
    names = ("forward_seconds", "backward_seconds", "compute_seconds", "cpu_seconds", "alpha")
    costs, rows = decision.costs, candidate_rows(decision, measured_at)
    is_measured = any(row.error is not None for row in rows)
    return {
        "decision": decision.to_json(),
        "closed_form_gpu_layers": closed_form_layers(decision),
        "sums": None if costs is None else {name: getattr(costs, name) for name in names},
        "fits": asdict(decision.bounds),
        "predictions_fit": worst_misfit(rows) is None if is_measured else None,
        "candidates": [asdict(row) for row in rows],
    }


def run_json(history: History) -> dict[str, Any]:
    """Everything about a run, as plain JSON values."""
    names = ("step", "gpu_layers_before", "gpu_layers_target", "predicted_seconds", "reason")
    decisions: list[dict[str, Any]] = []
    for index, decision in enumerate(history.decisions):
        measured = history.measured_after(index)
        row = {name: getattr(decision, name) for name in names}
        decisions.append(row | {"measured": None if measured is None else asdict(measured)})
    found = decision_json(explained(history), history.measured_at)
    return {"rank": history.rank, "ranks": history.ranks, "decisions": decisions, **found}


def _history_table(history: History) -> str:
    """The first decision, the last one, and those that moved layers."""
    last = len(history.decisions) - 1
    shown = [i for i, d in enumerate(history.decisions) if moves_layers(d) or i in (0, last)]
    rows = [("step", "from", "to", "predicted s", "measured s", "steps", "reason")]
    for index in shown[-_MOST_DECISIONS:]:
        decision, measured = history.decisions[index], history.measured_after(index)
        rows.append(
            (
                str(decision.step),
                str(decision.gpu_layers_before),
                str(decision.gpu_layers_target),
                _seconds(decision.predicted_seconds),
                _seconds(None if measured is None else measured.seconds),
                "-" if measured is None else str(measured.num_steps),
                decision.reason,
            )
        )
    lines = align(rows, left=(6,))
    lines.append(
        f"measured: the median of the steps with that k; the first {UNSTEADY_STEPS} after a change "
        "do not count."
    )
    if len(shown) <= last:
        lines.append(f"{counted(last + 1 - len(shown), 'decision')} changed nothing")
    if len(shown) > _MOST_DECISIONS:
        lines.append(f"({len(shown) - _MOST_DECISIONS} older ones)")
    return "\n".join(lines)


def layer_groups(costs: StepCosts) -> list[tuple[int, LayerCosts]]:
    """Neighbours of equal size: how many, and the mean of their times."""
    groups: list[tuple[int, LayerCosts]] = []
    for _, group in itertools.groupby(costs.layers, lambda layer: layer.parameters):
        layers = list(group)
        times = {
            each.name: statistics.mean(getattr(layer, each.name) for layer in layers)
            for each in fields(LayerCosts)
            if each.name not in ("name", "parameters")
        }
        groups.append((len(layers), replace(layers[0], **times)))
    return groups


def costs_text(costs: StepCosts) -> str:
    """Times of the layers, neighbours of equal size in one line, and their sums, with the closed
    form's t_B, t_U and alpha."""
    lines = ["a layer's mean, on this rank (sizes are of its shard):"]
    for count, mean in layer_groups(costs):
        times = [
            ("forward", mean.forward),
            ("backward", mean.backward),
            ("CPU update", mean.cpu_update),
            ("GPU update", mean.gpu_update),
            ("GPU to host", mean.to_host),
            ("host to GPU", mean.to_device),
        ]
        if costs.clipped_share > 0.0:
            times += [("clipped: commit", mean.cpu_commit), ("preview", mean.cpu_preview)]
        if costs.late_from:
            times.append(("updated late", mean.cpu_late))
        words = ", ".join(f"{name} {value * 1e3:.3g} ms" for name, value in times)
        lines.append(f"  {count} x {_short(mean.parameters / 1e6)} M: {words}")
    seconds = partial(_seconds, longest=max(costs.compute_seconds, costs.cpu_seconds))
    threads = "" if costs.update_threads is None else f" ({costs.update_threads} threads)"
    lines += [
        f"t_B, backward of all layers: {seconds(costs.backward_seconds)} s",
        f"t_U, CPU update of all layers: {seconds(costs.cpu_seconds)} s{threads}",
        f"alpha, GPU update over CPU update: {costs.alpha:.3g}",
        f"clipped share of the steps: {costs.clipped_share:.1%}",
        f"step without any update: {seconds(costs.compute_seconds)} s (forward "
        f"{seconds(costs.forward_seconds)}, between {seconds(costs.between)}, backward "
        f"{seconds(costs.backward_seconds)}, tail {seconds(costs.tail)})",
    ]
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 1.0 or not value else f"{value:.2g}"


def candidates_text(rows: Sequence[CandidateRow]) -> str:
    """The table of numbers of GPU layers: of all, with times, or of some if there are no times."""
    is_predicted = any(row.predicted_seconds is not None for row in rows)
    is_measured = any(row.measured is not None for row in rows)
    predicted = ("predicted s", "worker s", "exposed s", "bound") if is_predicted else ()
    measured = ("measured s", "error") if is_measured else ()
    marks = ("",) if any(row.marks for row in rows) else ()
    head = ["GPU layers", "k", *predicted, "GPU GiB", "host GiB", "fits", *measured, *marks]
    cells = [head]
    seconds = partial(_seconds, longest=max(row.predicted_seconds or 0.0 for row in rows))
    for row in rows if is_predicted or is_measured else _ends(rows):
        line = [str(row.gpu_layers), f"{row.gpu_layers / rows[-1].gpu_layers:.2f}"]
        if is_predicted:
            times = (row.predicted_seconds, row.worker_seconds, row.exposed_seconds)
            line += [*map(seconds, times), (row.bound or "-").replace("gpu", "GPU")]
        line += [_short(size / _GIB) for size in (row.gpu_bytes, row.host_bytes)]
        line.append("yes" if row.fits else "no")
        if is_measured:
            error = "-" if row.error is None else f"{row.error:+.1%}"
            line += [seconds(row.measured and row.measured.seconds), error]
        if marks:
            line.append(f"<- {' = '.join(row.marks)}" if row.marks else "")
        cells.append(line)
    lines = align(cells, left=(len(head) - 1,) if marks else ())
    if is_predicted:
        lines.append(
            "worker: the CPU worker is busy; exposed: compute waits for weights; bound: what the "
            "step waits for."
        )
    if is_measured:
        lines.append(
            "measured: the median of the steady steps with that k. error: predicted over measured, "
            "of at least 5 steps."
        )
    return "\n".join(lines)


def _ends(rows: Sequence[CandidateRow]) -> list[CandidateRow]:
    """Rows at the ends of what fits and what does not, the marked rows, and some between."""
    fits, last, apart = [row.fits for row in rows], len(rows) - 1, max(1, len(rows) // 5)
    edges = {0, last, *range(0, last, apart)}
    edges |= {k for at in range(last) if fits[at] != fits[at + 1] for k in (at, at + 1)}
    return [row for k, row in enumerate(rows) if k in edges or row.marks]


def _seconds(value: float | None, longest: float | None = None) -> str:
    """Text of a time, with a digit more if ``longest`` (without one: it itself) is below 0.1 s."""
    if value is None:
        return "-"
    return f"{value:.{3 if (longest or value) >= 0.1 else 4}f}"
