"""The step over the number of GPU layers: measured, predicted, and the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.common.records import GIB, Json
from experiments.solve_k.summary import measured_points, part_name, reference_seconds

INK, GRID, LIMIT = "#333333", "#dddddd", "#888888"
MEASURED, PREDICTED, SOLVED, CLOSED = "#1f77b4", "#d08770", "#2a7f3f", "#8a63b0"


def panels(parts: list[Json]) -> list[tuple[Json, Json]]:
    """The processes that timed fixed k, with their part."""
    return [
        (part, record)
        for part in parts
        for record in part["records"]
        if record["result"] and measured_points(record["result"])
    ]


def chart(parts: list[Json], path: Path) -> None:
    """One panel for each process that timed fixed k; no file where there is none."""
    shown = panels(parts)
    if not shown:
        return
    # Imported here, so that the table can be made where there is no matplotlib.
    from matplotlib.figure import Figure

    columns = 1 if len(shown) <= 2 else 2
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(7.5 * columns, 4.3 * rows), layout="constrained")
    axes: list[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for (part, record), one in zip(shown, axes, strict=False):
        draw(one, part, record)
    for unused in axes[len(shown) :]:
        unused.set_axis_off()
    figure.savefig(path, dpi=120)


def draw(axes: Any, part: Json, record: Json) -> None:
    """One panel."""
    result = record["result"]
    points = measured_points(result)
    solved = result.get("solved")
    if solved and solved["predicted_seconds"]:
        predicted = solved["predicted_seconds"]
        label = "predicted from costs at the solved k"
        axes.plot(range(len(predicted)), predicted, color=PREDICTED, linewidth=1.5, label=label)
    numbers = [point["gpu_layers"] for point in points]
    seconds = [point["step_seconds"] for point in points]
    axes.plot(numbers, seconds, "o", color=MEASURED, markersize=5, label="measured, k fixed")
    if solved:
        axes.plot(
            [solved["gpu_layers"]],
            [solved["step_seconds"]],
            marker="D",
            linestyle="",
            markersize=9,
            markerfacecolor="none",
            markeredgecolor=SOLVED,
            markeredgewidth=2,
            label=f"measured, k solved: {solved['gpu_layers']}",
        )
    if result.get("closed_form"):
        layers = result["closed_form"]["gpu_layers"]
        label = f"the closed form's k: {layers}"
        axes.axvline(layers, color=CLOSED, linestyle="--", linewidth=1, label=label)
    limit = reference_seconds(result)
    if limit is not None:
        axes.axhline(limit, color=LIMIT, linestyle=":", label="forward and backward only")
    _finish(axes, part, record, points)


def _finish(axes: Any, part: Json, record: Json, points: list[Json]) -> None:
    num_layers = points[0]["num_layers"]
    axes.set_xlabel(f"layers updated on the GPU, of {num_layers}")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    workload, hardware = part["workload"], part["hardware"]
    title = (
        f"{part_name(part)}, {record['entry']['label']}: {workload['model']}, "
        f"{workload['batch']} x {workload['seq']} tokens, "
        f"{hardware['gpu'] or 'no GPU'}, {hardware['date']}"
    )
    axes.set_title(title, fontsize=10, color=INK)
    peaks = [point["gpu"].get("peak_allocated_bytes") for point in points]
    if all(peak is not None for peak in peaks):
        last = f"peak GPU {min(peaks) / GIB:.0f} to {max(peaks) / GIB:.0f} GiB"
        axes.annotate(last, (0.01, 0.02), xycoords="axes fraction", fontsize=8, color=INK)
