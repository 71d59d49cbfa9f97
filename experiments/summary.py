"""The numbers behind a README's tables, as small JSON: an experiment's results.json.

    python experiments/summary.py EXPERIMENT RUN=FILE [RUN=FILE ...] [--out FILE]

A FILE is what `run.py` of the experiment writes (`result.json`, of offload_step `part_*.json`), or
what `hytrain bench kernel --json` prints; RUN is how the README calls it. Machine, versions, commit
and command of every run come first, then a row for all that was measured. Without --out it is
printed. (Those of solve_k and unequal_gpus are made by hand of their reports' results.json.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies one level above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import records
from experiments.common.checks import REFERENCE, host_bytes, measured, step_seconds
from experiments.common.records import GIB, Json
from experiments.layer_major import report as layer_major_report
from experiments.offload_step import report as offload_step_report
from experiments.weak_scaling import report as weak_scaling_report


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _gib(num_bytes: float) -> float | None:
    return _short(num_bytes / GIB)


def _windows(seconds: Sequence[float], digits: int = 5) -> list[float | None]:
    return [_short(one, digits) for one in seconds]


def weak_scaling(result: Json) -> list[Json]:
    """A row a system and number of GPUs; of each window the slowest rank's."""
    found = weak_scaling_report.measured([result])
    rows: list[Json] = []
    failed: list[Json] = []
    for launch in result["launches"]:
        gpus = launch["gpus"]
        for name, stage in launch["results"].items():
            if stage["status"] != records.OK:
                failed.append({"system": name, "gpus": gpus, "status": stage["status"]})
                continue
            row = found[name, gpus]
            windows = zip(*(rank["window_seconds"] for rank in stage["ranks"]), strict=True)
            rows.append(
                {
                    "system": name,
                    "gpus": gpus,
                    "step_s": _short(row["step_seconds"], 5),
                    "window_s": _windows([max(ranks) for ranks in windows], 4),
                    "samples_per_s": _short(row["samples_per_second"]),
                    "tflops_a_gpu": _short(row["tflops"]),
                    "weak_scaling": _short(weak_scaling_report.efficiency(found, name, gpus)),
                    "k": _short(row["gpu_fraction"], 3),
                    "peak_gpu_gib": _short(row["gpu_gib"]),
                }
            )
    return sorted(rows, key=lambda row: (row["system"], row["gpus"])) + failed


def layer_major(result: Json) -> list[Json]:
    """A row a mode; what a step says of itself is the last turn's."""
    reference = layer_major_report.seconds_of(result, layer_major_report.REFERENCE)
    rows: list[Json] = []
    for mode in result["modes"]:
        turns, seconds = mode["turns"], mode["seconds"]
        peaks = [turn["gpu"]["peak_allocated_bytes"] for turn in turns if turn["gpu"]]
        row = {
            "mode": mode["label"],
            "step_s": _short(seconds, 5),
            "turn_s": _windows([turn["seconds"] for turn in turns]),
            "over_reference": _short(seconds / reference),
            "tflops": _short(result["flops"] / seconds / 1e12),
            "peak_gpu_gib": _gib(max(peaks)) if peaks else None,
        }
        said = turns[-1].get("statistics", {})
        names = {"update_seconds": "update_s", "exposed_seconds": "exposed_s"}
        for name in ("update_seconds", "exposed_seconds", "clip_coefficient"):
            if said.get(name) is not None:
                row[names.get(name, name)] = _short(said[name])
        rows.append(row)
    return rows


def zero3(result: Json) -> list[Json]:
    """A row a mode; times are rank 0's."""
    rows: list[Json] = []
    base = result["modes"].get("stage2", {}).get("ranks", [{}])[0]
    for name, mode in result["modes"].items():
        ranks, first = mode["ranks"], mode["ranks"][0]
        ended = sorted({rank["status"] for rank in ranks})
        row: Json = {"mode": name, "gpus": len(ranks), "status": ", ".join(ended)}
        rows.append(row)
        if ended != [records.OK]:
            continue
        row["step_s"] = _short(first["step_seconds"], 5)
        row["window_s"] = _windows(first["window_seconds"])
        row["peak_gpu_gib"] = _gib(max(r["gpu"].get("peak_allocated_bytes") or 0 for r in ranks))
        row["host_gib"] = _gib(sum(rank["host_rss_bytes"] for rank in ranks))
        if mode["job"]["cap_share"] is not None:
            row["cap_gib"] = _gib(first["cap_bytes"])
        elif "losses" in base:
            pairs = zip(first["losses"], base["losses"], strict=True)
            most = max(abs(ours - theirs) for ours, theirs in pairs)
            row["largest_loss_difference_to_stage2"] = _short(most, 3)
    return rows


def offload_step(part: Json) -> list[Json]:
    """A row a system, made of all its repeats in the part."""
    rows: list[Json] = []
    limit = step_seconds(part, REFERENCE)
    for label in dict.fromkeys(record["entry"]["label"] for record in part["records"]):
        repeats = [r for r in part["records"] if r["entry"]["label"] == label]
        results, seconds = measured(part, label), step_seconds(part, label)
        row: Json = {"part": part["part"], "system": label}
        row["clipping"] = offload_step_report.clipping_text(repeats[0]["entry"])
        rows.append(row)
        if seconds is None:
            row["status"] = repeats[0]["status"]
            continue
        row["runs"] = len(results)
        row["step_s"] = _short(seconds, 5)
        row["window_s"] = _windows([s for r in results for s in r["timing"]["window_seconds"]])
        row["over_forward_backward"] = None if limit is None else _short(seconds / limit, 5)
        row["host_gib"] = _gib(max(host_bytes(result) for result in results))
        peak = offload_step_report.gpu_peak(part, label)
        row["peak_gpu_gib"] = None if peak is None else _gib(peak)
        row["tflops"] = _short(statistics.median(result["tflops"] for result in results))
        row["cpu_worker_busy"] = offload_step_report.busy_text(results)
        hidden, clipped = offload_step_report.observed_texts(results)
        row |= {"update_hidden": hidden, "steps_clipped": clipped}
        threads = {result.get("threads", {}).get("threads") for result in results} - {None}
        if threads:
            row["threads"] = sorted(threads)
    return rows


def kernel_bench(result: Json) -> list[Json]:
    """G parameters/s, GB/s and threads of every subject."""
    rates = {
        name: [round(v["gparams_per_s"], 4), round(v["gbytes_per_s"], 3), v["num_threads"]]
        for name, v in result.items()
        if isinstance(v, dict) and "gparams_per_s" in v
    }
    return [rates]


ROWS: dict[str, Callable[[Json], list[Json]]] = {
    "kernel_bench": kernel_bench,
    "layer_major": layer_major,
    "offload_step": offload_step,
    "weak_scaling": weak_scaling,
    "zero3": zero3,
}


def _machine(result: Json) -> Json:
    found = result.get("hardware") or result["machine"]
    versions = {"python": found["python"], **found["versions"]}
    if found.get("cuda"):
        versions["cuda"] = found["cuda"]
    return {"gpu": found.get("gpu"), "cpu": found["cpu"], "versions": versions}


def summary(rows: Callable[[Json], list[Json]], results: dict[str, Json]) -> Json:
    """All runs' rows, with where they come from.

    Args:
        rows: of :data:`ROWS`.
        results: a run's name -> what was written.

    Raises:
        ValueError: runs of different machines or versions; a summary has one.
    """
    machines = [_machine(result) for result in results.values()]
    if any(machine != machines[0] for machine in machines):
        raise ValueError(f"runs of different machines or versions: {machines}")
    runs: list[Json] = []
    for name, result in results.items():
        found = result.get("hardware") or result["machine"]
        run = {"run": name, "date": found["date"], "commit": found.get("commit")}
        command = result.get("command") or found.get("command")
        runs.append({**run, "cores": found["cores"], "command": command})
        if "gradients" in result:
            runs[-1]["gradients"] = {k: _short(v) for k, v in result["gradients"].items()}
    lines = [{"run": name, **row} for name, result in results.items() for row in rows(result)]
    return {"machine": machines[0], "runs": runs, "rows": lines}


def text_of(found: Json) -> str:
    """JSON with a line a run and a row, so that a change shows what has changed."""
    parts: list[str] = []
    for key, value in found.items():
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(line)}" for line in value) + "\n]"
        else:
            text = json.dumps(value)
        parts.append(f'"{key}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=sorted(ROWS))
    parser.add_argument("runs", nargs="+", metavar="RUN=FILE")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    results: dict[str, Json] = {}
    for run in options.runs:
        name, separator, path = run.partition("=")
        if not separator or name in results:
            parser.error(f"{run!r}: runs are given as RUN=FILE, each name once")
        results[name] = records.read_json(Path(path))
    try:
        text = text_of(summary(ROWS[options.experiment], results))
    except ValueError as error:
        parser.error(str(error))
    if options.out is None:
        print(text, end="")
    else:
        options.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
