"""Measure one part of the comparison: every system in its own process, one JSON file at the end.

    python experiments/offload_step/run.py --part A --out DIR
    python experiments/offload_step/run.py --part B --out DIR --device cpu --model toy

DIR/part_A.json is rewritten after every system, so that an interrupted part keeps what it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.offload_step import records
from experiments.offload_step.launch import environment, run_job, stop
from experiments.offload_step.parts import (
    PARTS,
    Settings,
    entries_of,
    expected_seconds,
    needs_adam,
)
from experiments.offload_step.records import Entry, Job, Json, Measurement, Workload
from experiments.offload_step.sizes import SIZES

LIMIT_FACTOR = 2.5
"""A process may take this many times its expected seconds before it counts as hung."""

WORTH_A_TRY = 0.6
"""A system starts while this share of its expected seconds is left, for those are generous."""

CLOSING_SECONDS = 5.0
"""Kept free at the end of a part's time."""


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


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
    add("--gpu-fractions", default=(0.0, 0.3, 0.5, 0.7, 1.0), type=_numbers, metavar="F,F,...")
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add(
        "--threads",
        default=(8, 12, 16),
        type=_counts,
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
    if only is None:
        return entries
    wanted = {label.strip() for label in only.split(",")}
    unknown = wanted - {entry.label for entry in entries}
    if unknown:
        known = ", ".join(dict.fromkeys(entry.label for entry in entries))
        raise ValueError(f"--only names {sorted(unknown)}, but the part has: {known}")
    return [entry for entry in entries if entry.label in wanted or entry is entries[0]]


def prepare(job: Job, entries: list[Entry], prefault_gib: int, limit: float) -> Json:
    """Compile DeepSpeed's Adam and fill the host's memory, side by side; failures are recorded."""
    commands = []
    if needs_adam(entries):
        commands.append(["adam"])
    if prefault_gib:
        commands.append(["memory", str(prefault_gib)])
    module = [sys.executable, "-m", "experiments.offload_step.prepare"]
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            [*module, *command],
            cwd=Path(__file__).resolve().parents[2],
            env=environment(job),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in commands
    ]
    report = {}
    for command, process in zip(commands, processes, strict=True):
        try:
            output, _ = process.communicate(timeout=max(1.0, limit - (time.monotonic() - begin)))
            lines = output.decode(errors="replace").splitlines()
        except subprocess.TimeoutExpired:
            stop(process)
            lines = ["timed out"]
        report[command[0]] = {"exit_status": process.returncode, "log": lines[-5:]}
        print(f"prepare {command[0]}: {lines[-1] if lines else 'no output'}", flush=True)
    report["seconds"] = time.monotonic() - begin
    return report


def measure_entry(job: Job, remaining: float) -> Json:
    """One entry's record; skipped where the remaining seconds are too few for it."""
    expected = expected_seconds(job.entry, job.workload.model)
    if remaining < WORTH_A_TRY * expected:
        return {
            "status": records.SKIPPED,
            "log": [f"{remaining:.0f} s left, about {expected:.0f} s needed"],
            "result": None,
        }
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
    from experiments.offload_step.hardware import describe

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
