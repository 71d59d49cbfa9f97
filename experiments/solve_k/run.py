"""Measure one part: k solved beside fixed k, one JSON file at the end.

    python experiments/solve_k/run.py --part sweep --out DIR
    python experiments/solve_k/run.py --part sweep --out DIR --device cpu --model toy --layers 8

Parts: sweep, caps, follow, few_cores, ten_b, largest, others. DIR/part_NAME.json is rewritten
after every process, so that an interrupted part keeps what it has. Each process has a folder,
DIR/NAME_<label>, with its log, its result as it grows, and metrics.jsonl for `hytrain explain`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.options import LIMIT_FACTOR, counts, named, numbers, skipped
from experiments.common.processes import prepare
from experiments.common.records import Entry, Job, Json, Measurement, Workload
from experiments.common.sizes import MODELS, size_with
from experiments.solve_k.launch import run_job
from experiments.solve_k.parts import (
    MODEL,
    OTHER_SIZES,
    PARTS,
    Settings,
    entries_of,
    expected_seconds,
)
from experiments.solve_k.summary import summary

WORTH_A_TRY = 0.4
"""An entry starts while this share of its expected seconds is left, for those are generous."""

CLOSING_SECONDS = 8.0
"""Kept free at the end of a part's time."""


def _sizes(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, blocks = text.partition("=")
    return name, counts(blocks)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", required=True, choices=PARTS)
    add("--out", required=True, type=Path, help="folder for part_<PART>.json")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", choices=MODELS, help="default: the part's")
    add("--layers", type=int, metavar="N", help="so many blocks instead of the model's own")
    add("--batch", default=8, type=int, help="sequences a step")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add(
        "--caps",
        default=(0.30, 0.36, 0.42),
        type=numbers,
        metavar="F,F,...",
        help="shares of the GPU's memory that part caps allows",
    )
    add(
        "--few-threads",
        default=(2, 4),
        type=counts,
        metavar="N,N,...",
        help="threads that part few_cores gives the CPU update",
    )
    add(
        "--activation-checkpointing",
        default="part",
        choices=["part", "on", "off", "auto"],
        help="auto: where forward and backward do not fit without; part: as the part needs it",
    )
    add(
        "--least-settling",
        default=32,
        type=int,
        help="steps before k may count as settled, in parts sweep, caps and few_cores",
    )
    add(
        "--hytrain-section",
        default={},
        type=json.loads,
        metavar="JSON",
        help="further keys of hytrain's config section",
    )
    add(
        "--sizes",
        default=[],
        action="append",
        type=_sizes,
        metavar="SYSTEM=N,N,...",
        help="blocks that part others gives the model of a system, until one does not fit",
    )
    add("--other-threads", default=15, type=int, help="of the CPU updates in part others")
    add("--host-floor-gib", default=2.0, type=float, help="a process ends below this, available")
    add("--only", default=None, metavar="LABEL,...", help="measure these labels of --list")
    add("--list", action="store_true", help="show the part's entries and stop")
    add("--budget-seconds", default=550.0, type=float, help="time for the whole part")
    add(
        "--prefault-gib",
        default=0,
        type=int,
        help="touch this much host memory first, for machines whose memory grows with use",
    )
    return parser.parse_args(arguments)


def command_text(arguments: list[str]) -> str:
    """The command without the folder that it wrote to."""
    words = list(arguments)
    if "--out" in words:
        words[words.index("--out") + 1] = "DIR"
    return shlex.join(["python", "experiments/solve_k/run.py", *words])


def measure_entry(job: Job, remaining: float, folder: Path) -> Json:
    """One entry's record; skipped where the remaining seconds are too few for it."""
    expected = expected_seconds(job.entry, job.workload.model)
    if remaining < WORTH_A_TRY * expected:
        return skipped(remaining, expected)
    return run_job(job, folder, min(remaining, LIMIT_FACTOR * expected))


def has_failed(part: Json, entry: Entry) -> str | None:
    """The smaller model of the same search that did not train."""
    search = entry.options.get("search")
    for record in part["records"]:
        done = record["entry"]
        same = search is not None and done["options"].get("search") == search
        if same and record["status"] not in (records.OK, records.SKIPPED):
            return done["label"]
    return None


def run_part(options: argparse.Namespace, entries: list[Entry], command: str) -> Json:
    """Measure the entries one after another; the file is written after each of them."""
    # Imported here, so that --list and --help answer at once.
    from experiments.common.hardware import describe

    begin = time.monotonic()
    model = options.model or MODEL.get(options.part, "llama-3b")
    workload = Workload(model=model, batch=options.batch, seq=options.seq, device=options.device)
    measurement = Measurement(windows=2, steps=5, warmup=0)
    jobs = [Job(entry=entry, workload=workload, measurement=measurement) for entry in entries]
    path = options.out / f"part_{options.part}.json"
    part: Json = {
        "schema": records.SCHEMA,
        "experiment": "solve_k",
        "part": options.part,
        "command": command,
        "hardware": describe(options.device),
        "workload": dataclasses.asdict(workload),
        "prepare": prepare(jobs[0], entries, options.prefault_gib, options.budget_seconds / 3),
        "records": [],
    }
    for job in jobs:
        if (smaller := has_failed(part, job.entry)) is not None:
            print(f"{job.entry.label}: left out, {smaller} did not train", flush=True)
            continue
        remaining = options.budget_seconds - CLOSING_SECONDS - (time.monotonic() - begin)
        folder = options.out / f"{options.part}_{job.entry.label.replace(' ', '_')}"
        measured = measure_entry(job, remaining, folder)
        part["records"].append({"entry": dataclasses.asdict(job.entry), **measured})
        part["seconds"] = time.monotonic() - begin
        records.write_json(path, part)
        wall = measured.get("wall_seconds", 0.0)
        print(f"{job.entry.label}: {measured['status']}, {wall:.0f} s", flush=True)
    print("\n".join(summary(part)), flush=True)
    return part


def main(arguments: list[str]) -> int:
    """Exit status 0 also where a process failed: that is a result, and the file says so."""
    options = parse(arguments)
    settings = Settings(
        clip=options.clip,
        caps=options.caps,
        few_threads=options.few_threads,
        layers=options.layers,
        checkpointing=options.activation_checkpointing,
        section=options.hytrain_section,
        least_settling=options.least_settling,
        host_floor_gib=options.host_floor_gib,
        sizes=dict(options.sizes) or OTHER_SIZES,
        other_threads=options.other_threads,
    )
    try:
        entries = named(entries_of(options.part, settings), options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        model = options.model or MODEL.get(options.part, "llama-3b")
        size = size_with(model, options.layers)
        print(f"{model}: {size.num_parameters / 1e9:.3f} B parameters")
        for entry in entries:
            print(f"{entry.label:16s} about {expected_seconds(entry, model):.0f} s")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    run_part(options, entries, command_text(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
