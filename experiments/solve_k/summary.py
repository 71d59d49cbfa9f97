"""A part in a few lines, for the terminal. Plain data."""

from __future__ import annotations

import statistics

from experiments.common.records import GIB, Json
from experiments.solve_k.points import errors, largest_error


def part_name(part: Json) -> str:
    """With the run that it is of, where there were several."""
    return f"{part['part']}, run {part['run']}" if part.get("run") else part["part"]


def lowerings(result: Json) -> list[Json]:
    """The times that the cap was lowered and k had time to follow."""
    return result.get("lowerings", [])


def batch_changes(result: Json) -> list[Json]:
    """The times that the batch changed and k had time to follow."""
    return result.get("changes", [])


def measured_points(result: Json) -> list[Json]:
    """The fixed k that could be timed, in the order in which they were."""
    return [point for point in result.get("points", []) if "step_seconds" in point]


def step_by_layers(result: Json) -> dict[int, float]:
    """The fixed sweep: GPU layers -> step; the median where one was measured several times."""
    seconds: dict[int, list[float]] = {}
    for point in measured_points(result):
        seconds.setdefault(point["gpu_layers"], []).append(point["step_seconds"])
    return {n: statistics.median(values) for n, values in sorted(seconds.items())}


def solved_errors(result: Json) -> dict[int, float] | None:
    """Of the prediction that was made from costs at the solved k; None where there is none."""
    predicted = result.get("solved", {}).get("predicted_seconds")
    measured = step_by_layers(result)
    return errors(predicted, measured) if predicted and measured else None


def reference_seconds(result: Json) -> float | None:
    """Forward and backward only; the mean where it was measured before and after."""
    keys = ("reference", "reference_again")
    found = [result[key]["step_seconds"] for key in keys if key in result]
    return statistics.mean(found) if found else None


def _k(timed: Json) -> str:
    return f"{timed['gpu_layers']}/{timed['num_layers']}"


def _peak(timed: Json) -> str:
    peak = timed["gpu"].get("peak_allocated_bytes")
    return "-" if peak is None else f"{peak / GIB:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _timed_line(name: str, timed: Json, limit: float | None, error: float | None = None) -> str:
    text = (
        f"  {name:12s} k {_k(timed):6s} {timed['step_seconds']:.4f} s, "
        f"{timed['tflops']:.0f} TFLOP/s, peak GPU {_peak(timed)} GiB, "
        f"clipped {_share(timed['clipped_share'])}"
    )
    if limit is not None:
        text += f", {timed['step_seconds'] / limit:.3f} x fb"
    if error is not None:
        text += f", predicted {error:+.1%}"
    return text


def record_lines(record: Json) -> list[str]:
    """One process."""
    label, result = record["entry"]["label"], record["result"] or {}
    head = f"{label}: {record['status']}"
    if result.get("num_parameters"):
        head += f", {result['num_parameters'] / 1e9:.3f} B parameters"
    if result.get("cap") is not None:
        head += f", cap {result['cap']:.3f}"
    limit = reference_seconds(result)
    if limit is not None:
        head += f", forward and backward only {limit:.4f} s"
    lines = [head]
    if "settling" in result:
        settling = result["settling"]
        lines.append(
            f"  settled after {settling['settled_after']} of {settling['steps']} steps"
            + ("" if settling["is_settled"] else " (NOT settled)")
        )
    if "solved" in result:
        lines.append(_timed_line("solved", result["solved"], limit))
    for lowering in lowerings(result):
        cap = "none" if lowering["cap"] is None else f"{lowering['cap']:.3f}"
        lines.append(f"  cap lowered to {cap}")
        lines.append(_timed_line("followed", lowering["followed"], limit))
    for change in batch_changes(result):
        lines.append(
            f"  batch {change['batch']}: k last moved after {change['following']['settled_after']} "
            "steps"
        )
        lines.append(_timed_line("followed", change["timed"], None))
    found = solved_errors(result) or {}
    for point in sorted(measured_points(result), key=lambda point: point["gpu_layers"]):
        lines.append(_timed_line("fixed", point, limit, found.get(point["gpu_layers"])))
    worst = largest_error(found)
    if worst is not None:
        lines.append(f"  largest prediction error {worst[1]:+.1%} at {worst[0]} GPU layers")
    if "trained" in result:
        trained = result["trained"]
        lines.append(
            f"  trained      {trained['step_seconds']:.2f} s, {trained['tflops']:.0f} TFLOP/s, "
            f"host {trained['host_rss_bytes'] / GIB:.1f} GiB"
        )
    if record["log"]:
        lines.append(f"  last words: {record['log'][-1]}")
    return lines


def summary(part: Json) -> list[str]:
    """All of them."""
    lines = [f"part {part['part']}, {part.get('seconds', 0.0):.0f} s"]
    for record in part["records"]:
        lines += record_lines(record)
    return lines
