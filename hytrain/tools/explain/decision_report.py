"""One decision's costs, candidates and memory, for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from hytrain.formats.text_table import align
from hytrain.placement.costs import LayerCosts, StepCosts
from hytrain.placement.memory import table
from hytrain.placement.records import Decision
from hytrain.tools.explain.candidates import (
    CandidateRow,
    MeasuredAt,
    candidate_rows,
    closed_form_layers,
    fitting_bounds,
)

_GIB = 1024**3
_MEMORY_OF_ROW = ("gpu_layers", "gpu_bytes", "host_bytes", "fits")


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
    first, last = group[0], group[-1]
    times = {
        each.name: sum(getattr(layer, each.name) for layer in group) / len(group)
        for each in fields(LayerCosts)
        if each.name not in ("name", "parameters")
    }
    name = first.name if first is last else f"{first.name} .. {last.name}"
    return replace(first, name=name, **times)


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
    threads = "" if costs.update_threads is None else f" ({costs.update_threads} threads)"
    lines += [
        f"t_B, backward of all layers: {costs.backward_seconds:.3f} s",
        f"t_U, CPU update of all layers: {costs.cpu_seconds:.3f} s{threads}",
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
            seconds_text(row.predicted_seconds),
            seconds_text(row.worker_seconds),
            seconds_text(row.exposed_seconds),
            row.bound or "-",
            f"{row.gpu_bytes / _GIB:.1f}",
            f"{row.host_bytes / _GIB:.1f}",
            "yes" if row.fits else "no",
        ]
        if is_measured:
            error = "-" if row.error is None else f"{row.error:+.1%}"
            line += [seconds_text(row.measured_seconds), error]
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
    return "\n".join([*align(cells, left=(len(head) - 1,)), f"{legend}."])


def _marks(row: CandidateRow) -> str:
    marks = ["chosen"] * row.is_chosen + ["closed form"] * row.is_closed_form
    return f"<- {', '.join(marks)}" if marks else ""


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


def seconds_text(value: float | None) -> str:
    """A time, or that there is none."""
    return "-" if value is None else f"{value:.3f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f} M" if parameters >= 100_000 else str(parameters)


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
            {name: getattr(rows[number], name) for name in _MEMORY_OF_ROW} for number in memory_of
        ],
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
