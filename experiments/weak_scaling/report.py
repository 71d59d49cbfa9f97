"""The table and the claims of a result: for people, short.

python experiments/weak_scaling/report.py OUT/result.json [...] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.checks import Check
from experiments.common.records import GIB, Json
from experiments.weak_scaling.stages import NAMES

EFFICIENCY = 0.92
Measured = dict[tuple[str, int], Json]
"""(stage's name, GPUs) -> {"step_seconds", "samples_per_second", ...}."""


def measured(runs: Sequence[Json]) -> Measured:
    """Every stage that was measured; of several results the first."""
    found: Measured = {}
    for launch in (launch for run in runs for launch in run["launches"]):
        for name, result in launch["results"].items():
            key = (name, launch["gpus"])
            if result["status"] != records.OK or key in found:
                continue
            ranks = result["ranks"]
            seconds = max(rank["step_seconds"] for rank in ranks)
            peaks = [rank["gpu"].get("peak_allocated_bytes", 0) for rank in ranks]
            found[key] = {
                "step_seconds": seconds,
                "samples_per_second": sum(rank["samples"] for rank in ranks) / seconds,
                "tflops": statistics.mean(rank["tflops"] for rank in ranks),
                "gpu_gib": max(peaks) / GIB,
                "gpu_fraction": ranks[0]["gpu_fraction"],
            }
    return found


def efficiency(found: Measured, name: str, gpus: int) -> float | None:
    """Throughput over that of one GPU times the number of GPUs."""
    one, many = found.get((name, 1)), found.get((name, gpus))
    if one is None or many is None:
        return None
    return many["samples_per_second"] / (gpus * one["samples_per_second"])


def check_all(found: Measured) -> list[Check]:
    """Weak scaling of hytrain; the others are reported beside it."""
    checks: list[Check] = []
    for name, gpus in sorted(found, key=lambda key: (key[0], key[1])):
        system = name.split(" ")[0]
        if gpus == 1:
            continue
        if system == "hytrain":
            value = efficiency(found, name, gpus)
            claim = f"{name}: weak scaling to {gpus} GPUs"
            checks.append(Check(claim=claim, value=value, limit=EFFICIENCY, at_least=True))
            continue
        ours = found.get((name.replace(system, "hytrain"), gpus))
        times = None if ours is None else found[name, gpus]["step_seconds"] / ours["step_seconds"]
        claim = f"{name} on {gpus} GPUs: its time over hytrain's"
        checks.append(Check(claim=claim, value=times, limit=None, at_least=True))
    return checks


def text_of(runs: Sequence[Json]) -> str:
    """The whole table."""
    found = measured(runs)
    lines = ["| system | GPUs | step s | samples/s | TFLOP/s a GPU | weak scaling | k | GPU GiB |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, gpus), row in sorted(found.items()):
        share = efficiency(found, name, gpus)
        k = row["gpu_fraction"]
        words = NAMES[name.split(" ")[0]] + name[len(name.split(" ")[0]) :]
        lines.append(
            f"| {words} | {gpus} | {row['step_seconds']:.4f} | {row['samples_per_second']:.2f} | "
            f"{row['tflops']:.0f} | {'-' if share is None else f'{share:.3f}'} | "
            f"{'-' if k is None else f'{k:.2f}'} | {row['gpu_gib']:.1f} |"
        )
    for launch in (launch for run in runs for launch in run["launches"]):
        for name, result in launch["results"].items():
            if result["status"] != records.OK:
                words = [rank["error"] for rank in result["ranks"] if rank and "error" in rank]
                last = (words or result.get("log", [])[-1:] or [""])[0].splitlines()
                why = last[0][:90] if last else ""
                lines.append(f"{name} on {launch['gpus']}: {result['status']}: {why}")
    lines.append("")
    for check in check_all(found):
        value = "-" if check.value is None else f"{check.value:.3f}"
        limit = "" if check.limit is None else f" (>= {check.limit:g})"
        lines.append(f"{check.claim}: {value}{limit} {check.verdict}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Prints the table of the results; with --write, keeps it beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="table.md and results.json")
    options = parser.parse_args(arguments)
    runs = [records.read_json(path) for path in options.results]
    text = text_of(runs)
    print(text)
    if options.write is not None:
        records.write_json(options.write / "results.json", {"schema": 1, "runs": runs})
        (options.write / "table.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
