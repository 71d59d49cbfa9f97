"""Measure weak scaling: the same batch a GPU on 1, 2 and 4 equal GPUs, beside DeepSpeed's offload.

    python experiments/weak_scaling/run.py --gpus 4 --sizes 4,1,2 --out DIR
    python experiments/weak_scaling/run.py --gpus 2 --sizes 2,1 --out DIR --device cpu --model toy

Each number of GPUs is a job of its own, one after another, since they share the host. A GPU has the
same cores in all of them. DIR/result.json is rewritten after every system. The table comes last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.group import (
    Place,
    Work,
    describe_beside,
    divide_cores,
    environment,
    run_all,
)
from experiments.common.options import counts
from experiments.common.processes import REPOSITORY
from experiments.common.records import Json
from experiments.common.sizes import SIZES
from experiments.weak_scaling.report import text_of
from experiments.weak_scaling.stages import SYSTEMS, Launch, launches, stages_of

CLOSING_SECONDS = 5.0
"""Kept free at the end of the time."""

WORTH_A_TRY = 0.4
"""A launch starts while this share of its expected seconds is left, for those are generous."""


def _fraction(text: str) -> float | str:
    return text if text == "solve" else float(text)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", required=True, type=int, help="of the machine; its cores are divided by them")
    add("--sizes", default=(4, 1, 2), type=counts, metavar="N,...", help="GPUs of each job")
    add("--systems", default="hytrain,zero2,zero3", help=f"of {', '.join(SYSTEMS)}")
    add("--out", required=True, type=Path, help="folder for result.json and the logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", default="llama-3b", choices=list(SIZES))
    add("--batch", default=8, type=int, help="sequences a micro-batch")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--accumulation", default=(1,), type=counts, metavar="N,...", help="micro-batches a step")
    add("--gpu-fraction", default="solve", type=_fraction, help="hytrain's k")
    add("--settle", default=24, type=int, help="hytrain's steps before the timed ones: k is solved")
    add("--warmup", default=3, type=int, help="the other systems' steps before the timed ones")
    add("--steps", default=4, type=int, help="steps of each of the two timed windows")
    add("--budget-seconds", default=550.0, type=float, help="time for everything")
    add("--list", action="store_true", help="show the launches and stop")
    return parser.parse_args(arguments)


def place(gpus: int, size: int, device: str) -> Place:
    """The first GPUs, each with its own part of all cores, however many GPUs take part."""
    cores = divide_cores(sorted(os.sched_getaffinity(0)), gpus)
    return Place(device=device, gpus=tuple(range(size)), cores=cores[:size])


def build_adam(where: Place, limit: float) -> Json:
    """Compiles DeepSpeed's CPU Adam, before anything of DeepSpeed is timed."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "experiments.common.prepare", "adam"]
    env = {**environment(where, 0, (0, 0)), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=env, capture_output=True, timeout=limit, check=False
        )
        log = (done.stdout + done.stderr).decode(errors="replace").splitlines()[-3:]
        code: int | None = done.returncode
    except subprocess.TimeoutExpired:
        log, code = ["timed out"], None
    return {"exit_status": code, "log": log, "seconds": time.monotonic() - begin}


def measure(options: argparse.Namespace, planned: Sequence[Launch], command: str) -> Json:
    """One launch after another; the file is written after every system."""
    begin = time.monotonic()
    until = begin + options.budget_seconds - CLOSING_SECONDS
    names = ("model", "batch", "seq", "gpu_fraction", "settle", "warmup", "steps")
    settings = {name: getattr(options, name) for name in names}
    result: Json = {
        "schema": records.SCHEMA,
        "command": command,
        "settings": settings,
        "launches": [],
    }

    hardware = describe_beside(result, options.device, options.gpus)

    def save() -> None:
        result["seconds"] = time.monotonic() - begin
        records.write_json(options.out / "result.json", result)
        done = [(each["gpus"], list(each["results"])) for each in result["launches"]]
        print(f"{result['seconds']:.0f} s: {done}", flush=True)

    for number, (size, systems, seconds) in enumerate(planned):
        where = place(options.gpus, size, options.device)
        if systems != ["hytrain"] and "adam" not in result:
            result["adam"] = build_adam(where, max(1.0, until - time.monotonic()))
        if until - time.monotonic() < WORTH_A_TRY * seconds:
            break
        stages = stages_of(systems, options.accumulation, settings)
        work = Work(f"launch{number}_{size}", stages, size)
        result["launches"].append({"gpus": size, "results": work.results})
        run_all(
            [work],
            "experiments.weak_scaling.worker",
            lambda _, where=where: [where],
            options.out,
            until,
            save,
        )
    hardware.join()
    save()
    return result


def main(arguments: list[str]) -> int:
    """Exit status 0 also where a system failed: that is a result, and the file says so."""
    options = parse(arguments)
    try:
        planned = launches(options.systems.split(","), options.sizes, options.accumulation)
        if max(options.sizes) > options.gpus:
            raise ValueError(f"--sizes has {max(options.sizes)}, --gpus is {options.gpus}")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for size, systems, seconds in planned:
            print(f"{size} GPUs: {', '.join(systems)}, about {seconds:.0f} s")
        return 0
    command = shlex.join(["experiments/weak_scaling/run.py", *arguments])
    print(text_of([measure(options, planned, command)]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
