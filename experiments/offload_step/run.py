"""Measure one part of the comparison: every system in its own process, one JSON file at the end.

    python experiments/offload_step/run.py --part A --out DIR
    python experiments/offload_step/run.py --part B --out DIR --device cpu --model toy

DIR/part_A.json is rewritten after every system, so that an interrupted part keeps what it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.options import LIMIT_FACTOR, counts, named, numbers, skipped
from experiments.common.processes import prepare
from experiments.common.records import Entry, Job, Json, Measurement, Workload
from experiments.common.sizes import SIZES
from experiments.offload_step.launch import run_job
from experiments.offload_step.parts import PARTS, Settings, entries_of, expected_seconds

WORTH_A_TRY = 0.6
"""A system starts while this share of its expected seconds is left, for those are generous."""

CLOSING_SECONDS = 5.0
"""Kept free at the end of a part's time."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", required=True, choices=PARTS)
    add("--out", required=True, type=Path, help="folder for part_<PART>.json")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", default="llama-3b", choices=list(SIZES))
    add("--batch", default=8, type=int, help="sequences a step")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--windows", default=3, type=int)
    add("--steps", default=5, type=int, help="steps in a window")
    add("--warmup", default=4, type=int, help="steps before anything is timed")
    add("--gpu-fractions", default=(0.0, 0.3, 0.5, 0.7, 1.0), type=numbers, metavar="F,F,...")
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add(
        "--threads",
        default=(8, 12, 16),
        type=counts,
        metavar="N,N,...",
        help="CPU threads that DeepSpeed and FSDP2 may choose from",
    )
    add(
        "--hytrain-section",
        default={},
        type=json.loads,
        metavar="JSON",
        help="further keys of hytrain's config section",
    )
    add(
        "--only",
        default=None,
        metavar="LABEL,...",
        help="measure these labels of the part (as --list shows them) beside the reference",
    )
    add("--list", action="store_true", help="show the part's entries and stop")
    add("--budget-seconds", default=570.0, type=float, help="time for the whole part")
    add(
        "--prefault-gib",
        default=0,
        type=int,
        help="touch this much host memory first, for machines whose memory grows with use",
    )
    return parser.parse_args(arguments)


def select(entries: list[Entry], only: str | None) -> list[Entry]:
    """The entries named by --only, the reference always among them."""
    chosen = named(entries, only)
    return chosen if entries[0] in chosen else [entries[0], *chosen]


def measure_entry(job: Job, remaining: float) -> Json:
    """One entry's record; skipped where the remaining seconds are too few for it."""
    expected = expected_seconds(job.entry, job.workload.model)
    if remaining < WORTH_A_TRY * expected:
        return skipped(remaining, expected)
    with tempfile.TemporaryDirectory() as folder:
        return run_job(job, Path(folder), min(remaining, LIMIT_FACTOR * expected))


def _summary(record: Json) -> str:
    """One line for the terminal."""
    result = record["result"]
    label = f"{record['entry']['label']:24s}"
    if result is None:
        last = record["log"][-1] if record["log"] else ""
        return f"{label} {record['status']}: {last}"
    busy = result["worker_busy_share"]
    return (
        f"{label} {result['step_seconds']:.4f} s a step, {result['tflops']:.1f} TFLOP/s"
        + ("" if busy is None else f", CPU worker busy {busy:.0%}")
        + f" ({record['wall_seconds']:.0f} s in all)"
    )


def run_part(options: argparse.Namespace, entries: list[Entry]) -> Json:
    """Measure the entries one after another; the file is written after each of them."""
    # Imported here, so that --list and --help answer at once.
    from experiments.common.hardware import describe

    begin = time.monotonic()
    workload = Workload(
        model=options.model, batch=options.batch, seq=options.seq, device=options.device
    )
    measurement = Measurement(windows=options.windows, steps=options.steps, warmup=options.warmup)
    jobs = [Job(entry=entry, workload=workload, measurement=measurement) for entry in entries]
    path = options.out / f"part_{options.part}.json"
    part: Json = {
        "schema": records.SCHEMA,
        "part": options.part,
        "hardware": describe(options.device),
        "workload": dataclasses.asdict(workload),
        "measurement": dataclasses.asdict(measurement),
        "prepare": prepare(jobs[0], entries, options.prefault_gib, options.budget_seconds / 2),
        "records": [],
    }
    for position, job in enumerate(jobs):
        remaining = options.budget_seconds - CLOSING_SECONDS - (time.monotonic() - begin)
        entry = dataclasses.asdict(job.entry)
        record = {"entry": entry, "position": position, **measure_entry(job, remaining)}
        part["records"].append(record)
        part["seconds"] = time.monotonic() - begin
        records.write_json(path, part)
        print(_summary(record), flush=True)
    return part


def main(arguments: list[str]) -> int:
    """Exit status 0 also where a system failed: that is a result, and the file says so."""
    options = parse(arguments)
    settings = Settings(
        gpu_fractions=options.gpu_fractions,
        clip=options.clip,
        threads=options.threads,
        section=options.hytrain_section,
    )
    try:
        entries = select(entries_of(options.part, settings), options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for entry in entries:
            seconds = expected_seconds(entry, options.model)
            print(f"{entry.label:24s} about {seconds:.0f} s{' optional' * entry.optional}")
        return 0
    run_part(options, entries)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
