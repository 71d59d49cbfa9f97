"""Measure unequal GPUs: profile, plan, train, beside each GPU alone and the even split.

    python experiments/unequal_gpus/run.py --part two,memory --gpus 4 --out DIR
    python experiments/unequal_gpus/run.py --part two --out DIR --device cpu --model toy

Each run has processes of its own, one a GPU: the profile, from which the plan is made, then what is
trained. Without a GPU all ranks are equal, and there is nothing to run out of.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.report import Claim, ratio, short, worst
from experiments.unequal_gpus.cases import PARTS, Case, jobs_of
from experiments.unequal_gpus.planning import predicted_seconds

SUM_OF_SPEEDS, TIMES_EVEN, PREDICTION, SLOWDOWN = 0.93, 2.2, 0.07, 0.10
DID_NOT_FIT = (records.OUT_OF_MEMORY, records.REFUSED)


def _sms(text: str) -> dict[str, int]:
    """`1=128,0.5=48` as a table from speed to multiprocessors; speeds as Python writes them."""
    pairs = (word.split("=") for word in text.split(","))
    return {f"{float(speed):g}": int(count) for speed, count in pairs}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, seq=512)
    add = parser.add_argument
    add("--part", required=True, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    add("--gpus", type=int, help="by which the cores are divided; default: the case's")
    add("--compare-waits", default=0, type=int, metavar="ROUNDS",
        help="planned runs in turns, ranks waiting in a stream and in NCCL's kernels")  # fmt: skip
    add("--batch-scale", default=1.0, type=float, help="times the cases' batches")
    add("--sms", default={"1": 128, "0.5": 48, "0.25": 24}, type=_sms, metavar="SPEED=N,...",
        help="multiprocessors that stand for a speed (1=128,0.5=48,0.25=24)")  # fmt: skip
    add("--profile-seconds", default=12.0, type=float, help="for the layers, about")
    add("--warmup", default=3, type=int, help="steps before a run is timed")
    add("--steps", default=4, type=int, help="timed steps of a run")
    options = parser.parse_args(arguments)
    if unknown := set(options.part.split(",")) - set(PARTS):
        parser.error(f"--part {sorted(unknown)} is unknown: choose of {', '.join(PARTS)}")
    return options


def _as_asked(case: Case, options: argparse.Namespace) -> Case:
    batch = max(2, round(case.batch * options.batch_scale))
    turns = [f"{run}#{n}" for n in range(1, options.compare_waits + 1)
             for run in ("planned", "in_kernels")][1:]  # fmt: skip
    runs = [run for run in case.runs]
    if turns and "planned" in runs:
        at = runs.index("planned") + 1
        runs[at:at] = turns
    return dataclasses.replace(case, batch=batch, runs=tuple(runs))


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each run of each case."""
    names = ("sms", "profile_seconds", "warmup", "steps")
    settings = runner.workload(options) | {name: getattr(options, name) for name in names}
    cases = [case for part in options.part.split(",") for case in PARTS[part]]
    return [job for case in cases for job in jobs_of(_as_asked(case, options), settings)]


def rows(result: Json) -> list[Json]:
    """A row for each case, with its plan and each of its runs."""
    cases: dict[str, list[Json]] = {}
    for record in result["jobs"]:
        cases.setdefault(record["job"]["case"]["label"], []).append(record)
    found: list[Json] = []
    for label, some in cases.items():
        case = some[0]["job"]["case"]
        row: Json = {"case": label}
        row |= {name: case[name] for name in ("speeds", "memory", "batch")}
        for record in some:
            run = record["label"].removeprefix(f"{label} ")
            ranks = record["ranks"]
            if record["status"] != records.OK:
                row[run] = record["status"]
            elif run == "profile":
                row |= _plan(ranks[0])
            else:
                row[run] = _trained(run, ranks)
                if run.startswith("planned"):
                    plan, share = some[0]["ranks"][0]["planned"], row[run]["clipped_share"]
                    row[run]["predicted_s"] = short(predicted_seconds(plan, share or 0.0), 5)
        found.append(row)
    return found


def _plan(rank: Json) -> Json:
    keys = ("batch_sizes", "micro_batch_sizes", "activations", "shard_fractions", "gpu_fractions")
    plan = {key: rank["planned"][key] for key in keys}
    for key in ("shard_fractions", "gpu_fractions"):
        plan[key] = [short(value) for value in plan[key]]
    return {
        "speeds_of_passes": [[short(own) for own in both] for both in rank["speeds"]],
        "passes_samples_per_s": short(rank["passes_samples_per_s"]),
        "plan": plan,
        **{"no_even_split": rank["even_split"], "none_without_offload": rank["without_host"]},
    }


def _trained(run: str, ranks: Sequence[Json]) -> Json:
    rates = [rank["samples_per_s"] for rank in ranks]
    return {
        "samples_per_s": short(sum(rates) if run == "alone" else min(rates), 5),
        "step_s": [short(rank["step_seconds"], 5) for rank in ranks],
        "gpu_gib": [report.peak_gib([rank]) for rank in ranks],
        "clipped_share": ranks[0]["clipped_share"],
        "allocator_retries": [rank["allocator_retries"] for rank in ranks],
    }


def claims(rows: Sequence[Json]) -> list[Claim]:
    """The claims of every case of every run."""
    found: list[Claim] = []
    for row in rows:
        name = " ".join(str(row[key]) for key in ("run", "part", "case") if key in row)
        if "planned" in row:
            found += [dataclasses.replace(c, text=f"{name}: {c.text}") for c in _of_case(row)]
    return found


def _of_case(row: Json) -> list[Claim]:
    def rate(run: str) -> float | None:
        return row[run]["samples_per_s"] if isinstance(row.get(run), dict) else None

    def fits_not(run: str) -> float | None:
        status = row.get(run)
        return float(status in DID_NOT_FIT) if status is not None else None

    found: list[Claim] = []
    if "speeds_of_passes" in row:
        pairs = zip(row["speeds"], row["speeds_of_passes"], strict=True)
        off = worst(abs(own / stated - 1.0) for stated, both in pairs for own in both)
        found.append(Claim("forward and backward from the stated speed, most", off, SLOWDOWN))
    if min(row["memory"]) == 1.0:
        quarter = TIMES_EVEN if row["speeds"] == [1.0, 0.25] else None
        passes = ratio(rate("planned"), row.get("passes_samples_per_s"))
        found += [
            Claim("planned over the sum of the GPUs alone", ratio(rate("planned"), rate("alone")),
                  SUM_OF_SPEEDS, at_least=True),
            Claim("planned over the sum of forward and backward alone", passes, at_least=True),
            Claim("planned over the even split", ratio(rate("planned"), rate("even")), quarter,
                  at_least=True),
        ]  # fmt: skip
    else:
        found += [
            Claim(f"{run} does not fit", fits_not(run), 1.0, at_least=True)
            for run in ("even", "even_offload", "no_offload")
            if run in row
        ]
    if isinstance(row["planned"], dict):
        step = max(row["planned"]["step_s"])
        error = abs(step / row["planned"]["predicted_s"] - 1.0)
        found.append(Claim("step predicted, error", error, PREDICTION))
    steps = {
        kind: [
            max(v["step_s"]) for k, v in row.items() if k.split("#")[0] == kind and "step_s" in v
        ]
        for kind in ("in_kernels", "planned")
    }
    if all(steps.values()):
        in_kernels, in_stream = (statistics.median(each) for each in steps.values())
        text = "step, ranks waiting in NCCL's kernels over waiting in a stream"
        found.append(Claim(text, in_kernels / in_stream, at_least=True))
    return found


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    text = report.of_result(rows, claims)
    raise SystemExit(runner.main(asked, jobs(asked), text, shares=asked.gpus))
