"""The step time over k as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hytrain.placement.costs import StepCosts
from hytrain.tools.explain.candidates import CandidateRow
from hytrain.tools.pictures import picture


def draw_chart(
    path: Path, rows: Sequence[CandidateRow], costs: StepCosts, *, title: str = ""
) -> None:
    """Writes the predicted step over k, with what was measured, as a PNG.

    Args:
        path: the file; replaced.
        rows: of :func:`~hytrain.tools.explain.candidates.candidate_rows`, with predictions.
        costs: what they were predicted from.
        title: of the picture.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    with picture(path, (8, 4.5), flag="--png", without="give --no-png") as figure:
        axes: Any = figure.subplots()
        _draw(axes, rows, costs)
        if title:
            axes.set_title(title, fontsize=10)


def _draw(axes: Any, rows: Sequence[CandidateRow], costs: StepCosts) -> None:
    num_layers = len(rows) - 1
    numbers = [row.gpu_layers for row in rows]
    predicted = [row.predicted_seconds for row in rows]
    for index, (begin, end) in enumerate(_not_fitting(rows)):
        label = "does not fit in memory" if index == 0 else None
        axes.axvspan(begin - 0.5, end + 0.5, color="0.85", label=label)
    axes.plot(numbers, predicted, color="C0", label="predicted step")
    worker = [row.worker_seconds for row in rows]
    axes.plot(numbers, worker, color="C1", linestyle="--", label="CPU worker busy")
    axes.axhline(
        costs.compute_seconds, color="C2", linestyle=":", label="compute alone, no updates"
    )
    measured = [(r.gpu_layers, r.measured_seconds) for r in rows if r.measured_seconds is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o", color="C3", label="measured, median")
    for name, marker, marked in (
        ("chosen", "*", [row for row in rows if row.is_chosen]),
        ("closed form", "D", [row for row in rows if row.is_closed_form]),
    ):
        for row in marked:
            axes.plot(
                row.gpu_layers,
                row.predicted_seconds,
                marker,
                markersize=14 if marker == "*" else 9,
                markerfacecolor="none",
                markeredgecolor="black",
                linestyle="none",
                label=f"{name}: {row.gpu_layers} of {num_layers}",
            )
    axes.set(
        xlabel=f"layers updated on the GPU, of {num_layers}",
        ylabel="seconds a step",
        xlim=(-0.5, num_layers + 0.5),
    )
    axes.set_ylim(bottom=0.0)

    def share(number: Any) -> Any:  # of a number or an array of them
        return number / num_layers

    def number(share: Any) -> Any:
        return share * num_layers

    shares = axes.secondary_xaxis("top", functions=(share, number))
    shares.set_xlabel("k")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _not_fitting(rows: Sequence[CandidateRow]) -> list[tuple[int, int]]:
    """Runs of numbers that do not fit, first and last of each."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if row.fits:
            continue
        if runs and runs[-1][1] == row.gpu_layers - 1:
            runs[-1] = (runs[-1][0], row.gpu_layers)
        else:
            runs.append((row.gpu_layers, row.gpu_layers))
    return runs
