"""k solved beside fixed k, under less memory and with fewer cores, and the largest models.

    python experiments/solve_k/run.py --part sweep --out DIR
    python experiments/solve_k/run.py --part sweep --out DIR --device cpu --model toy --layers 8

Parts: sweep, caps, follow, few_cores, ten_b, largest, others. DIR/LABEL/ has a process's log, its
result as it grows, and of parts with k solved metrics.jsonl for `hytrain explain`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.report import Claim, gib, ratio, short, worst

MODEL = {"ten_b": "llama-10b", "largest": "llama-15b", "others": "llama-7b"}
"""Models of the parts that have one of their own; the others train llama-3b."""
OTHERS = {
    "zero2_offload": "deepspeed_zero2_offload",
    "zero3_offload": "deepspeed_zero3_offload",
    "fsdp2": "fsdp2",
}
"""Name -> system, of those whose largest model is searched."""
OTHER_SIZES = (24, 27, 30, 33, 36)
"""Blocks of the models that each is tried with, until one does not fit."""
SPARE_CORES = 2
"""Cores beside the update's threads: one launches, one runs the backward pass."""
NEAR_BEST = 1.01
"""Steps up to this times the best are as good; the fewest GPU layers among them set the memory."""


def _sizes(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, blocks = text.partition("=")
    if name not in OTHERS:
        raise argparse.ArgumentTypeError(f"{text!r}: the system is one of {', '.join(OTHERS)}")
    return name, runner.counts(blocks)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, model=None)
    add = parser.add_argument
    add("--part", required=True, choices=PARTS)
    add("--layers", type=int, metavar="N", help="so many blocks instead of the model's own")
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add("--caps", default=(0.30, 0.36, 0.42), type=runner.numbers, metavar="F,F,...",
        help="shares of the GPU's memory that part caps allows")  # fmt: skip
    add("--few-threads", default=(2, 4), type=runner.counts, metavar="N,N,...",
        help="threads that part few_cores gives the CPU update")  # fmt: skip
    add("--least-settling", default=32, type=int, help="steps before k may count as settled")
    add("--hytrain-section", default={}, type=json.loads, metavar="JSON",
        help="further keys of hytrain's config section")  # fmt: skip
    add("--sizes", nargs="+", type=_sizes, metavar="SYSTEM=N,N,...",
        default=[(name, OTHER_SIZES) for name in OTHERS],
        help="blocks of a system's models in part others, until one does not fit")  # fmt: skip
    add("--other-threads", default=15, type=int, help="of the CPU updates in part others")
    add("--host-floor-gib", default=2.0, type=float, help="a process ends below this, available")
    return parser.parse_args(arguments)


def _sweep(options: argparse.Namespace) -> list[Json]:
    """A job for the solved k and fixed ones."""
    fractions = [tenth / 10 for tenth in range(11)]
    return [
        {"label": "sweep", "plan": "sweep", "fractions": fractions, "offsets": [-1, 0, 1],
         "seconds": 200.0}
    ]  # fmt: skip


def _caps(options: argparse.Namespace) -> list[Json]:
    """Jobs with less and less GPU memory from the start, and one that loses some in training."""
    capped = [{"label": f"cap {cap:g}", "cap": cap, "seconds": 65.0} for cap in options.caps]
    return [*capped, {"label": "cap lowered", "plan": "lowered", "seconds": 100.0}]


def _follow(options: argparse.Namespace) -> list[Json]:
    """A job whose batch changes while it trains."""
    return [{"label": "batch changed", "plan": "follow", "seconds": 100.0}]


def _few_cores(options: argparse.Namespace) -> list[Json]:
    """Jobs as on a host with few cores."""
    return [
        {
            **{"label": f"{count} threads", "plan": "sweep", "seconds": 200.0},
            **{"fractions": [0.5, 0.7, 0.85, 1.0], "offsets": [-4, -2, 0, 2, 4]},
            **{"cores": count + SPARE_CORES, "cpu_threads": count},
        }
        for count in options.few_threads
    ]


def _big(options: argparse.Namespace) -> list[Json]:
    """Jobs of models that neither GPU nor host could hold alone: bare passes, then k solved."""
    is_largest = options.part == "largest"
    least = 12 if is_largest else 16
    settle = {"least": least, "quiet": 6 if is_largest else 10, "most": 2 * least + 8}
    common: Json = {"checkpointing": is_largest, "seconds": 120.0, "settle": settle}
    bare = {"system": "forward_backward", "drops": True, "warmup": 2}
    return [{**common, "label": "forward and backward", **bare}, {**common, "label": options.part}]


def _others(options: argparse.Namespace) -> list[Json]:
    """Jobs that find the largest model of other systems: growing ones, until one does not fit."""
    return [
        {
            **{"label": f"{name} {blocks}", "system": OTHERS[name], "search": name},
            **{"group": name, "group_ends": "failed", "layers": blocks, "checkpointing": True},
            **{"threads": [options.other_threads], "warmup": 2, "steps": 1, "seconds": 130.0},
            # Without a norm over all gradients on the host, in FSDP2's favour, as in offload_step.
            **({"clip": None} if name == "fsdp2" else {}),
        }
        for name, sizes in options.sizes
        for blocks in sizes
    ]


PARTS = {
    **{"sweep": _sweep, "caps": _caps, "follow": _follow, "few_cores": _few_cores},
    **{"ten_b": _big, "largest": _big, "others": _others},
}


def jobs(options: argparse.Namespace) -> list[Json]:
    """The part's jobs in order."""
    found: list[Json] = []
    for one in PARTS[options.part](options):
        section = dict(options.hytrain_section)
        if "cpu_threads" in one:
            offload = {**section.get("offload", {}), "cpu_threads": one["cpu_threads"]}
            section["offload"] = offload
        own = "experiments.solve_k.worker" if "plan" in one else "experiments.common.bench"
        job: Json = {
            **{"worker": own, "system": "hytrain", "gpu_fraction": "solve", "part": options.part},
            **{"clip": options.clip, "section": section, "layers": options.layers},
            **{"windows": 2, "steps": 5, "host_floor_gib": options.host_floor_gib},
            "settle": {"most": 60, "quiet": 10, "least": options.least_settling},
            **runner.workload(options),
            "model": options.model or MODEL.get(options.part, "llama-3b"),
            **one,
        }
        if job["system"] != "hytrain":
            del job["settle"]
        found.append(job)
    return found


def _timed(what: str, timed: Json, limit: float | None, predicted: float | None = None) -> Json:
    row: Json = {"what": what}
    for key in ("gpu_layers", "of", "cap"):
        if timed.get(key) is not None:
            row[key] = timed[key]
    row["step_s"] = short(timed["step_seconds"], 5)
    row["over_forward_backward"] = short(ratio(timed["step_seconds"], limit))
    row |= {"tflops": short(timed["tflops"]), "peak_gpu_gib": report.peak_gib([timed])}
    row |= {"host_gib": gib(timed["host_bytes"]), "clipped": short(timed.get("clipped"))}
    if predicted is not None:
        row["prediction_error"] = short(predicted / timed["step_seconds"] - 1.0, 3)
    if "predicted_for_its_clipping" in timed:
        error = timed["predicted_for_its_clipping"] / timed["step_seconds"] - 1.0
        row["error_clipping_known"] = short(error, 3)
    return row


def rows(result: Json) -> list[Json]:
    """A row for each process, and for each thing that it timed."""
    found: list[Json] = []
    bare = [r["ranks"][0] for r in result["jobs"] if r["job"]["system"] == "forward_backward"]
    for record in result["jobs"]:
        name = {"part": record["job"]["part"], "process": record["label"]}
        rank = (record["ranks"] or [{}])[0]
        process: Json = {**name, "what": "process", "status": record["status"]}
        if record["status"] != records.OK:
            process |= report.failure(record)
        settling = rank.get("settling", {})
        process |= {
            **{"parameters": rank.get("num_parameters"), "cap": record["job"].get("cap")},
            "settled_after": settling.get("settled_after"),
            "settling_steps": settling.get("steps"),
            "closed_form_gpu_layers": rank.get("closed_form_gpu_layers"),
            "host_left_least_gib": gib(rank.get("host_available_least_bytes")),
            "system": record["job"].get("search"),
        }
        found.append({key: value for key, value in process.items() if value is not None})
        found += [name | row for row in _rows_of(record["job"], rank, bare)]
    return found


def _rows_of(job: Json, rank: Json, bare: Sequence[Json]) -> list[Json]:
    references = [rank[key] for key in ("reference", "reference_again") if key in rank]
    references = references or [one for one in bare if "step_seconds" in one]
    seconds = [one["step_seconds"] for one in references]
    limit = statistics.mean(seconds) if seconds else None
    found: list[Json] = []
    for what, key in (("", "reference"), (", again", "reference_again")):
        if key in rank:
            found.append(_timed(f"forward and backward only{what}", rank[key], limit))
    solved = rank.get("solved", rank if "step_seconds" in rank else None)
    if solved is not None:
        what = {"hytrain": "k solved", "forward_backward": "forward and backward only"}
        found.append(_timed(what.get(job["system"], "trained"), solved, limit))
    for one in rank.get("followed", []):
        row = _timed(one["what"], one, limit)
        found.append(row | {"settled_after": one["settling"]["settled_after"]})
    points = [point for point in rank.get("points", []) if "step_seconds" in point]
    for point in sorted(points, key=lambda point: point["gpu_layers"]):
        predicted = (solved or {}).get("predicted_seconds")
        one = predicted[point["gpu_layers"]] if predicted else None
        found.append(_timed("fixed k", point, limit, one))
    return found


# -- claims, of rows ---------------------------------------------------------------------------


def _processes(rows: Sequence[Json]) -> dict[tuple[str, str, str], list[Json]]:
    """(run, part, process) -> its rows."""
    found: dict[tuple[str, str, str], list[Json]] = {}
    for row in rows:
        key = (str(row.get("run", "")), str(row.get("part", "")), row["process"])
        found.setdefault(key, []).append(row)
    return found


def _sweep_claims(name: str, some: Sequence[Json], most_over_best: float) -> list[Claim]:
    """The claims on the solved k beside the fixed ones of one process."""
    fixed: dict[int, list[Json]] = {}
    for row in some:
        if row["what"] == "fixed k":
            fixed.setdefault(row["gpu_layers"], []).append(row)
    solved = next((row for row in some if row["what"] == "k solved"), None)
    if solved is None or not fixed:
        return []
    steps = {n: statistics.median(row["step_s"] for row in each) for n, each in fixed.items()}
    best = min(steps.values())
    layers = solved["gpu_layers"]
    own = [solved["step_s"], *(row["step_s"] for row in fixed.get(layers, ()))]
    seconds = statistics.median(own)
    enough = min(n for n, value in steps.items() if value <= NEAR_BEST * best)
    peaks = [fixed[n][0].get("peak_gpu_gib") if n in fixed else None for n in (layers, enough)]
    limits = [row["step_s"] for row in some if row["what"].startswith("forward and backward")]
    errors = [abs(row["prediction_error"]) for row in some if "prediction_error" in row]
    known = [abs(row["error_clipping_known"]) for row in some if "error_clipping_known" in row]
    over = ratio(seconds, statistics.mean(limits) if limits else None)
    chosen = (row.get("closed_form_gpu_layers") for row in some)
    published = next((layers for layers in chosen if layers is not None), None)
    nearest = None if published is None else min(steps, key=lambda n: abs(n - published))
    return [
        Claim(f"{name}: step at the solved k / best fixed k", seconds / best, most_over_best),
        Claim(f"{name}: GPU memory / at the smallest k within 1 % of the best", ratio(*peaks), 1.0),
        Claim(f"{name}: step at the solved k / forward and backward only", over, 1.08),
        Claim(f"{name}: largest prediction error, costs taken at the solved k", worst(errors), 0.1),
        Claim(f"{name}: the same, given how often each point was clipped", worst(known)),
        Claim(f"{name}: step at the closed form's k / best fixed k",
              None if nearest is None else steps[nearest] / best),
    ]  # fmt: skip


def claims(rows: Sequence[Json]) -> list[Claim]:
    """Every claim of every run."""
    found: list[Claim] = []
    solved: dict[str, dict[float, int]] = {}
    for (run, _, process), some in _processes(rows).items():
        name = f"{run} {process}".strip()
        if any(row["what"] == "fixed k" for row in some):
            found += _sweep_claims(name, some, 1.03 if process == "sweep" else 1.10)
        for row in some:
            if row["what"] == "k solved" and process.startswith("cap "):
                cap = 1.0 if process == "cap lowered" else float(process.removeprefix("cap "))
                solved.setdefault(run, {})[cap] = row["gpu_layers"]
            if row["what"] == "process" and process.startswith("cap "):
                is_out = float(row.get("status") == records.OUT_OF_MEMORY)
                found.append(Claim(f"{name}: out of memory", is_out, 0.0))
            if row["what"] == "k solved" and process in ("ten_b", "largest"):
                over = row.get("over_forward_backward")
                share = ratio(1.0, over)
                text = f"{name}: share of the speed of forward and backward only"
                found.append(Claim(text, share, 0.75, at_least=True))
    for run, levels in solved.items():
        counts = [layers for _, layers in sorted(levels.items())]
        grown = [after - before for before, after in itertools.pairwise(counts)]
        text = f"{run} caps: GPU layers gained by each larger cap"
        found.append(Claim(text, worst(grown, at_least=True), 0.0, at_least=True))
    trained: dict[str, float] = {}
    for row in rows:
        if row.get("system") in OTHERS and row.get("status") == records.OK:
            most = max(trained.get(row["system"], 0.0), row["parameters"] / 1e9)
            trained[row["system"]] = most
    return found + [Claim(f"largest of {n}: billion parameters", v) for n, v in trained.items()]


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows, claims)))
