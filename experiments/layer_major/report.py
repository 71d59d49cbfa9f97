"""The table of a result, and whether it is what was expected. No torch here."""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.records import GIB, Json, read_json

MOST_OVER_REFERENCE = 1.08
"""Layer-major's step over forward and backward with recomputed blocks."""

GRADIENT_TOLERANCE = 0.02
"""Of a layer's largest gradient: bf16 sums of 4 micro-batches, in kernels that add in any order."""

REFERENCE = "forward and backward only, checkpointed blocks"


def seconds_of(result: Json, label: str) -> float:
    """The median step of a mode."""
    return next(m["seconds"] for m in result["modes"] if m["label"] == label)


def verdicts(result: Json) -> list[tuple[str, float, bool]]:
    """(what, measured, whether it is within its limit)."""
    reference = seconds_of(result, REFERENCE)
    found = [
        (
            f"{mode['label']}: over forward and backward, both recomputing (<= 1.08)",
            mode["seconds"] / reference,
            mode["seconds"] / reference <= MOST_OVER_REFERENCE,
        )
        for mode in result["modes"]
        if mode["label"].startswith("layer-major")
    ]
    for label, worst in result["gradients"].items():
        found.append((f"{label}: gradients' largest difference", worst, worst < GRADIENT_TOLERANCE))
    return found


def _gib(turns: list[Json]) -> str:
    peaks = [t["gpu"]["peak_allocated_bytes"] for t in turns if t["gpu"]]
    return f"{max(peaks) / GIB:.1f}" if peaks else "-"


def table(result: Json) -> str:
    """Markdown."""
    options, hardware = result["options"], result["hardware"]
    reference = seconds_of(result, REFERENCE)
    lines = [
        f"{hardware['gpu'] or hardware['cpu']}, {hardware['cores']} cores, {hardware['date']}, "
        f"commit {hardware['commit']}; {options['model']}, {options['micro_batches']} "
        f"micro-batches of {options['batch']} x {options['seq']}, "
        f"gpu_fraction {options['gpu_fraction']}; "
        f"medians of {options['rounds']} turns of {options['steps']} steps",
        "",
        "| step | s | over the reference | least .. most s | TFLOP/s | CPU update s | exposed s "
        "| clipped by | peak GPU GiB | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for mode in result["modes"]:
        turns = mode["turns"]
        times = [t["seconds"] for t in turns]
        statistics = turns[-1].get("statistics", {})
        update, exposed, clipped = (
            f"{statistics[name]:.3f}" if statistics.get(name) is not None else "-"
            for name in ("update_seconds", "exposed_seconds", "clip_coefficient")
        )
        lines.append(
            f"| {mode['label']} | {mode['seconds']:.3f} | {mode['seconds'] / reference:.3f} "
            f"| {min(times):.3f} .. {max(times):.3f} "
            f"| {result['flops'] / mode['seconds'] / 1e12:.0f} | {update} | {exposed} "
            f"| {clipped} | {_gib(turns)} | {turns[-1]['loss']:.3f} |"
        )
    lines += ["", "| expected | measured | |", "| --- | --- | --- |"]
    for what, value, holds in verdicts(result):
        lines.append(f"| {what} | {value:.4g} | {'yes' if holds else 'NO'} |")
    lines += ["", f"{result['total_seconds']:.0f} s in all."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(read_json(Path(sys.argv[1]))))
