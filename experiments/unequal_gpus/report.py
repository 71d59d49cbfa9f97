"""The table of a result: for people, short.

python experiments/unequal_gpus/report.py OUT/result.json [...] [--write FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.checks import Check
from experiments.common.records import GIB, Json
from experiments.unequal_gpus import checks


def _numbers(values: Sequence[float], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def case_lines(case: Json) -> list[str]:
    """What a case's GPUs are, what was planned, and each run."""
    spec = case["case"]
    speeds = " : ".join(f"{speed:g}" for speed in spec["speeds"])
    lines = [f"[{spec['label']}] speeds {speeds}, memory {spec['memory']}, batch {spec['batch']}"]
    counted = checks.counted_slowdowns(case)
    if counted is not None:
        lines += [
            f"  {count:4d} multiprocessors: forward {forward:.3f}, backward {backward:.3f}"
            for count, forward, backward in counted
        ]
        return lines
    slow = checks.slowdowns(case)
    profiles = checks.result_of(case, "profile")
    if slow is not None and profiles is not None:
        sms = [rank["made_unequal"].get("granted_sms", 0) for rank in profiles]
        lines.append(
            f"  multiprocessors {sms}; forward {_numbers([f for _, f, _ in slow], 3)}, "
            f"backward {_numbers([b for _, _, b in slow], 3)} of the first's speed"
        )
    plan = checks.result_of(case, "plan")
    if plan is not None:
        planned = plan[0]["planned"]
        lines.append(
            f"  plan: batches {planned['batch_sizes']} by {planned['micro_batch_sizes']}"
            f"{_activations(planned)}, shards "
            f"{_numbers(planned['shard_fractions'], 3)}, k {_numbers(planned['gpu_fractions'], 2)},"
            f" predicted {planned['predicted_seconds']:.4f} s, GPU "
            f"{_numbers(planned['gpu_gib'], 1)} GiB, host {_numbers(planned['host_gib'], 1)} GiB"
        )
    for run in spec["runs"]:
        lines.append(_run_line(case, run))
    return lines


def _activations(planned: Json) -> str:
    """Each rank's policy, where any is not to store them (old results have none)."""
    policies = planned.get("activations", [])
    return f" ({', '.join(policies)})" if set(policies) - {"store"} else ""


def _run_line(case: Json, run: str) -> str:
    found = case["results"].get(run)
    if found is None:
        return f"  {run:13s} not measured"
    ranks = checks.result_of(case, run)
    if ranks is None:
        ranked = [rank for rank in found["ranks"] if rank and "error" in rank]
        ranked.sort(key=lambda rank: rank["status"] != found["status"])
        words = [rank["error"] for rank in ranked]
        first = (words or found.get("log", [])[-1:] or [""])[0].splitlines()
        return f"  {run:13s} {found['status']}: {first[0][:90] if first else ''}"
    seconds = [rank["step_seconds"] for rank in ranks]
    rate = checks.throughput(case, run)
    peaks = [rank["gpu"].get("peak_allocated_bytes", 0) / GIB for rank in ranks]
    text = f"  {run:13s} {rate:8.2f} samples/s, step {_numbers(seconds, 4)} s"
    if any(peaks):
        text += f", GPU {_numbers(peaks, 1)} GiB"
    hosts = [rank.get("host_grown_bytes", 0) / GIB for rank in ranks]
    if max(hosts) >= 1.0:
        text += f", host {_numbers(hosts, 1)} GiB"
    return text + _planned_words(case, ranks) if run == "planned" else text


def _planned_words(case: Json, ranks: Sequence[Json]) -> str:
    """How many of the steps were clipped, what was predicted for that, what the allocator did."""
    words = ""
    share = checks.clipped_share(case, "planned")
    if share is not None:
        words += f", {share:.0%} clipped"
        predicted = checks.judged_prediction(case)
        if predicted is not None:
            words += f" (predicted {predicted:.4f} s)"
    report = checks.reported(case)
    if report is not None:
        words += (
            f", by the engine's report median {report['measured_seconds']:.4f} s, predicted "
            f"{report['predicted_seconds']:.4f} s"
        )
    again = checks.bare_over_profile(case)
    if again is not None:
        words += f", bare passes {_numbers(again, 2)} of the profile's"
    allocators = [rank.get("allocator", {}) for rank in ranks]
    if all("num_alloc_retries" in allocator for allocator in allocators):
        words += f", retries {[allocator['num_alloc_retries'] for allocator in allocators]}"
    return words


def check_lines(found: Sequence[Check]) -> list[str]:
    """A line a claim."""
    lines: list[str] = []
    for check in found:
        value = "-" if check.value is None else f"{check.value:.3f}"
        sign = ">=" if check.at_least else "<="
        limit = "" if check.limit is None else f" ({sign} {check.limit:g})"
        lines.append(f"  {check.part:8s} {check.claim}: {value}{limit} {check.verdict}")
    return lines


def text_of(cases: Sequence[Json]) -> str:
    """The whole table."""
    lines = [line for case in cases for line in case_lines(case)]
    return "\n".join([*lines, "claims:", *check_lines(checks.check_all(cases))])


def run_line(run: Json) -> str:
    """What was measured on, with what, and how."""
    hardware = run["hardware"]
    versions = ", ".join(f"{name} {value}" for name, value in hardware["versions"].items() if value)
    nccl = "".join(f"{name}={value} " for name, value in hardware.get("nccl", {}).items())
    return (
        f"{hardware.get('gpus', '?')} x {hardware['gpu'] or 'no GPU'}, {hardware['cores']} cores "
        f"of {hardware['cpu']}; {hardware['date']}; Python {hardware['python']}, {versions}; "
        f"commit {hardware['commit']}: {nccl}{run['command']}"
    )


def main(arguments: list[str]) -> int:
    """Prints the table of the results; with --write, keeps it beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="table.md and results.json")
    options = parser.parse_args(arguments)
    runs = [records.read_json(path) for path in options.results]
    cases = [case for run in runs for case in run["cases"] if case["results"]]
    text = text_of(cases)
    print(text)
    if options.write is not None:
        text = "\n".join([*map(run_line, runs), "", text])
        records.write_json(options.write / "results.json", {"schema": 1, "runs": runs})
        (options.write / "table.md").write_text(f"```\n{text}\n```\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
