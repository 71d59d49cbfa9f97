"""Measure unequal GPUs: profile, plan, train, beside each GPU alone and the even split.

    python experiments/unequal_gpus/run.py --part four --out DIR
    python experiments/unequal_gpus/run.py --part two,memory --gpus 4 --out DIR
    python experiments/unequal_gpus/run.py --part two --out DIR --device cpu --model toy

DIR/result.json is rewritten after every stage, so that an interrupted run keeps what it has. Cases
run side by side where there are GPUs for it (`--gpus`). The table comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.group import Place, Work, describe_beside, divide_cores, run_all
from experiments.common.options import counts
from experiments.common.records import Json
from experiments.common.sizes import MODELS
from experiments.unequal_gpus.cases import (
    PARTS,
    RUNS,
    Case,
    cases_of,
    comparing_waits,
    stages_of,
    waves,
)
from experiments.unequal_gpus.checks import best_counts, counted_slowdowns
from experiments.unequal_gpus.report import text_of

SETTINGS = (
    *("model", "layers", "seq", "sms", "counts", "profile_seconds"),
    *("warmup", "steps", "even_steps"),
)
"""Options that the processes are given."""

CLOSING_SECONDS = 5.0
"""Kept free at the end of the time."""


def _sms(text: str) -> dict[str, int]:
    """`1=128,0.5=48` as a table from speed to multiprocessors; speeds as Python writes them."""
    pairs = (word.split("=") for word in text.split(","))
    return {str(float(speed)): int(count) for speed, count in pairs}


def _limits(text: str) -> tuple[str, list[float]]:
    """`offload=0.11,0.275,15.6`: a label with its numbers."""
    label, _, numbers = text.partition("=")
    return label, [float(number) for number in numbers.split(",")]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", required=True, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    add("--only", default=None, metavar="LABEL,...", help="these cases of the parts")
    add(
        "--runs",
        default={},
        type=_runs,
        metavar="[LABEL=]RUN[+RUN],...",
        help="only these runs after the plan, of all cases or of one (planned+alone,half=planned)",
    )
    add(
        "--compare-waits",
        default=0,
        type=int,
        metavar="ROUNDS",
        help="planned runs in turns, ranks waiting in a stream and in NCCL's kernels",
    )
    add("--out", required=True, type=Path, help="folder for result.json and the logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--gpus", default=None, type=int, help="GPUs to use; default: the largest case's")
    add("--model", default="llama-3b", choices=MODELS)
    add("--layers", default=None, type=int, metavar="N", help="so many blocks")
    add("--seq", default=512, type=int, help="tokens a sample")
    add("--batch-scale", default=1.0, type=float, help="times the cases' batches")
    add(
        "--sms",
        default={"1.0": 128, "0.5": 48, "0.25": 24},
        type=_sms,
        metavar="SPEED=N,...",
        help="multiprocessors that stand for a speed (1=128,0.5=48,0.25=24)",
    )
    add(
        "--sms-from",
        default=None,
        type=Path,
        metavar="RESULT.json",
        help="part slowdown's result: the multiprocessors that it found",
    )
    add(
        "--counts",
        default=(128, 120, 112, 104, 96, 64, 56, 48, 40, 32, 24),
        type=counts,
        metavar="N,N,...",
        help="multiprocessors that part slowdown tries",
    )
    add(
        "--limits",
        default=[],
        action="append",
        type=_limits,
        metavar="LABEL=F,...[,GIB]",
        help="a case's shares of GPU memory, one a rank, and GiB of host memory for all",
    )
    add("--profile-seconds", default=12.0, type=float, help="for the layers, about")
    add("--warmup", default=3, type=int, help="steps before a run is timed")
    add("--steps", default=4, type=int, help="timed steps of a run")
    add("--even-steps", default=2, type=int, help="timed steps of the even split, which is slow")
    add("--budget-seconds", default=550.0, type=float, help="time for everything")
    add("--list", action="store_true", help="show the cases and stop")
    return parser.parse_args(arguments)


def _runs(text: str) -> dict[str, tuple[str, ...]]:
    """`planned,half=alone+planned` as a table from label to runs; "" is of all other cases."""
    found: dict[str, tuple[str, ...]] = {}
    for word in text.split(","):
        label, _, runs = word.rpartition("=")
        found[label] = (*found.get(label, ()), *runs.split("+"))
    return found


def with_runs(case: Case, runs: dict[str, tuple[str, ...]]) -> Case:
    """The case with those of its runs that were asked for, in its own order.

    Raises:
        ValueError: a run that this case, or no case, has.
    """
    wanted = runs.get(case.label, runs.get(""))
    if wanted is None:
        return case
    unknown = set(wanted) - set(case.runs if case.label in runs else RUNS)
    if unknown:
        raise ValueError(f"--runs {case.label}: no {sorted(unknown)}, it has {list(case.runs)}")
    return dataclasses.replace(case, runs=tuple(run for run in case.runs if run in wanted))


def limited(case: Case, limits: Sequence[tuple[str, list[float]]]) -> Case:
    """The case with the limits that are given for it.

    Raises:
        ValueError: not as many as ranks, or one more.
    """
    for label, numbers in limits:
        if label != case.label:
            continue
        memory, host = tuple(numbers[: case.num_ranks]), numbers[case.num_ranks :]
        if len(memory) < case.num_ranks or len(host) > 1:
            raise ValueError(f"--limits {label}: {case.num_ranks} shares, then the host's GiB")
        case = dataclasses.replace(case, memory=memory, host_gib=host[0] if host else case.host_gib)
    return case


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases of --part, of which --only leaves some."""
    cases = [c for part in options.part.split(",") for c in cases_of(part, options.batch_scale)]
    unknown = set(options.runs) - {"", *(case.label for case in cases)}
    if unknown:
        raise ValueError(f"--runs names {sorted(unknown)}, which are no cases of the parts")
    cases = [with_runs(limited(case, options.limits), options.runs) for case in cases]
    if options.compare_waits:
        cases = [comparing_waits(case, options.compare_waits) for case in cases]
    if options.only is None:
        return cases
    wanted = set(options.only.split(","))
    unknown = wanted - {case.label for case in cases}
    if unknown:
        known = ", ".join(case.label for case in cases)
        raise ValueError(f"--only names {sorted(unknown)}, but the parts have: {known}")
    return [case for case in cases if case.label in wanted]


def sms_from_result(path: Path) -> dict[str, int]:
    """The table that --sms would have, from a result of part slowdown.

    Raises:
        ValueError: it has none.
    """
    for case in records.read_json(path)["cases"]:
        counted = counted_slowdowns(case)
        if counted is not None:
            return {str(speed): n for speed, n in best_counts(counted).by_speed.items()}
    raise ValueError(f"--sms-from {path}: there is no result of part slowdown in it")


def places(works: Sequence[Work], device: str, gpus: int) -> list[Place]:
    """GPUs, and the cores that belong to each, for works that run side by side."""
    cores = divide_cores(sorted(os.sched_getaffinity(0)), gpus)
    found: list[Place] = []
    first = 0
    for work in works:
        own = tuple(range(first, first + work.size))
        first += work.size
        found.append(Place(device=device, gpus=own, cores=tuple(cores[gpu] for gpu in own)))
    return found


def measure(options: argparse.Namespace, cases: list[Case], command: str) -> Json:
    """Runs the cases in waves; the file is written after every stage."""
    begin = time.monotonic()
    until = begin + options.budget_seconds - CLOSING_SECONDS
    settings = {name: getattr(options, name) for name in SETTINGS}
    gpus = options.gpus or max(case.num_ranks for case in cases)
    works = {
        case.label: Work(case.label, stages_of(case, settings), case.num_ranks) for case in cases
    }
    result: Json = {
        "schema": records.SCHEMA,
        "command": command,
        "settings": settings,
        "cases": [
            {"case": dataclasses.asdict(case), "results": works[case.label].results}
            for case in cases
        ],
    }

    hardware = describe_beside(result, options.device, gpus)

    def save() -> None:
        result["seconds"] = time.monotonic() - begin
        records.write_json(options.out / "result.json", result)
        done = {label: list(work.results) for label, work in works.items() if work.results}
        print(f"{result['seconds']:.0f} s: {done}", flush=True)

    save()
    for wave in waves(cases, gpus):
        if time.monotonic() > until:
            break
        run_all(
            [works[case.label] for case in wave],
            "experiments.unequal_gpus.worker",
            lambda them: places(them, options.device, gpus),
            options.out,
            until,
            save,
        )
    hardware.join()
    save()
    return result


def main(arguments: list[str]) -> int:
    """Exit status 0 also where a case failed: that is a result, and the file says so."""
    options = parse(arguments)
    try:
        cases = chosen(options)
        if options.sms_from is not None:
            options.sms = sms_from_result(options.sms_from)
        gpus = options.gpus or max(case.num_ranks for case in cases)
        planned = waves(cases, gpus)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for number, wave in enumerate(planned, 1):
            for case in wave:
                print(f"wave {number}: {case.label:8s} about {case.seconds:.0f} s, {case.runs}")
        return 0
    command = shlex.join(["experiments/unequal_gpus/run.py", *arguments])
    print(text_of(measure(options, cases, command)["cases"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
