"""Loss curves of several trainings at once, on one GPU: losses do not depend on time.

    python experiments/convergence/run.py --out out/convergence

Each training is a process of train_lm's script, on cores of its own; the next one starts as soon as
enough are free. Their progress is written to `result.json` repeatedly, so that an interrupted run
keeps its curves, and `--resume` runs those again that had not ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import hardware, records, runner
from experiments.common.records import Json
from experiments.convergence.cases import (
    HYTRAIN_CORES,
    LEARNING_RATE,
    SCHEDULE_STEPS,
    Case,
    all_cases,
    ds_config,
)
from experiments.convergence.curves import Curve, read_curve

TRAIN = hardware.REPOSITORY / "experiments" / "train_lm" / "train.py"
MODEL = Path(__file__).with_name("llama_97m.json")
RECORDED = ("model", "steps", "schedule_steps", "lr", "micro_batch", "seq_len")
"""Options that are recorded in the result."""
WRITE_SECONDS = 10.0
"""Seconds between two writes of the result, and between two checks of what can start."""


def start_training(
    folder: Path, config: Json, device: str, options: Sequence[object], cores: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Starts a process of train.py alone, whose results go to ``folder``/out.

    Args:
        folder: is created.
        config: the DeepSpeed JSON.
        device: "cuda" or "cpu".
        options: command-line options of train.py.
        cores: the process's own cores; all unless given.
    """
    folder.mkdir(parents=True)
    records.write_json(folder / "config.json", config)
    command = [sys.executable, str(TRAIN), "--deepspeed_config", str(folder / "config.json")]
    command += ["--out", str(folder / "out"), *map(str, options)]
    env = runner.environment(device) | {"OMP_NUM_THREADS": str(max(1, len(cores) - 1))}
    return runner.start(command, env, folder / "log", cores)


@dataclasses.dataclass
class Training:
    """A case's process, and what it has reached."""

    case: Case
    folder: Path
    process: subprocess.Popen[bytes]
    steps: int
    """Steps after which it is ended: enough of its schedule."""
    cores: list[int]
    started: float
    curve: Curve = dataclasses.field(default_factory=Curve)
    status: str = "running"
    seconds: float = 0.0

    def look(self) -> None:
        """Reads the curve, and finds out whether the training has ended."""
        if self.status != "running":
            return
        self.curve = read_curve(self.folder / "out" / "metrics.jsonl")
        self.seconds = time.monotonic() - self.started
        # Including the evaluation after the last step that is wanted.
        if len(self.curve.losses) >= self.steps and str(self.steps) in self.curve.held_out:
            self.stop(records.OK)
        elif self.process.poll() is not None:
            self.status = records.FAILED

    def stop(self, status: str) -> None:
        """Ends the training; its curve so far is kept."""
        if self.status == "running":
            runner.stop(self.process)
            self.status = status

    def record(self) -> Json:
        """The training's entry in the result."""
        about = {"status": self.status, "seconds": round(self.seconds, 1)}
        return {**dataclasses.asdict(self.case), **about, **dataclasses.asdict(self.curve)}


class Runs:
    """The cases that wait, those that run, and the cores that are free."""

    def __init__(self, cases: Sequence[Case], options: argparse.Namespace, scratch: Path) -> None:
        self.trainings: list[Training] = []
        self._waiting = list(cases)
        self._options = options
        self._scratch = scratch
        self._until = time.monotonic() + options.limit_seconds
        self._free = sorted(os.sched_getaffinity(0))
        self._num_cores = len(self._free)

    def _running(self) -> list[Training]:
        return [training for training in self.trainings if training.status == "running"]

    def go_on(self) -> bool:
        """Starts the cases that there are cores for, and waits; returns False once all is over."""
        self._start()
        waited = min(time.monotonic() + WRITE_SECONDS, self._until)
        while time.monotonic() < waited:
            if any(training.process.poll() is not None for training in self._running()):
                break
            time.sleep(0.2)
        for training in self._running():
            training.look()
            if training.status != "running":
                self._free = sorted([*self._free, *training.cores])
        steps = ", ".join(f"{t.case.label} {len(t.curve.losses)}" for t in self._running())
        left = self._until - time.monotonic()
        print(f"{left:4.0f} s left: {steps}", flush=True)
        return left > 0.0 and bool(self._running() or self._waiting)

    def stop(self) -> None:
        """Ends all trainings."""
        for training in self.trainings:
            training.stop("stopped")

    def _start(self) -> None:
        """Starts cases in order: those behind one that needs more cores than are free wait, too."""
        ended = [t.seconds for t in self.trainings if t.status == records.OK]
        if ended and self._until - time.monotonic() < min(ended):
            self._waiting.clear()  # they would not finish
        for case in list(self._waiting):
            needed = min(case.cores, self._num_cores)
            if needed > len(self._free):
                return
            cores = [self._free.pop() for _ in range(needed)]
            self._waiting.remove(case)
            self.trainings.append(self._training(case, cores))

    def _training(self, case: Case, cores: list[int]) -> Training:
        asked = self._options
        config = ds_config(
            case, micro_batch=asked.micro_batch, cpu_threads=max(1, len(cores) - 1),
            on_gpu=asked.device == "cuda", schedule_steps=asked.schedule_steps, lr=asked.lr,
        )  # fmt: skip
        options = [
            *("--engine", case.engine, "--model", asked.model, "--attention", case.attention),
            *("--seed", case.seed, "--steps", asked.steps, "--seq-len", asked.seq_len),
            *("--eval-every", asked.eval_every, "--eval-sequences", asked.eval_sequences),
        ]
        folder = self._scratch / f"run{len(self.trainings)}"
        process = start_training(folder, config, asked.device, options, cores)
        steps = round(asked.steps * case.enough)
        return Training(case, folder, process, steps, cores, time.monotonic())


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else "",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/convergence"))
    add("--only", nargs="+", default=[], help="cases whose label has one of these words")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--model", default=str(MODEL), help="of train_lm")
    add("--steps", type=int, default=4000)
    add("--hytrain-cores", type=int, default=HYTRAIN_CORES, help="of a training with hytrain")
    add("--schedule-steps", type=int, default=SCHEDULE_STEPS, help="warm-up and cosine")
    add("--lr", type=float, default=LEARNING_RATE)
    add("--micro-batch", type=int, default=4)
    add("--seq-len", type=int, default=256)
    add("--eval-every", type=int, default=500)
    add("--eval-sequences", type=int, default=256)
    add("--limit-seconds", type=float, default=520.0, help="after which all are ended")
    add("--resume", type=Path, help="result.json of an earlier run, whose ended trainings are kept")
    return parser


def furthest(trainings: Sequence[Json]) -> list[Json]:
    """Keeps, of each training that was run twice, the run with more steps."""
    found: dict[tuple[str, int], Json] = {}
    for training in trainings:
        case = training["kind"], training["seed"]
        if case not in found or len(training["losses"]) > len(found[case]["losses"]):
            found[case] = training
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all trainings; the exit status is 1 if one failed."""
    options = make_parser().parse_args(argv)
    earlier = [] if options.resume is None else records.read_json(options.resume)["trainings"]
    had = {(t["kind"], t["seed"]) for t in earlier if t["status"] == records.OK}
    cases = [
        dataclasses.replace(case, cores=options.hytrain_cores) if case.engine == "hytrain" else case
        for case in all_cases()
        if (case.kind, case.seed) not in had
        and (not options.only or any(word in case.label for word in options.only))
    ]
    result: Json = {
        "command": "run.py " + " ".join(sys.argv[1:]),
        "hardware": hardware.describe(options.device),
        "options": {k: getattr(options, k) for k in RECORDED},
    }
    runner.end_on_sigterm()
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(cases, options, Path(scratch))
        is_over = False
        try:
            while not is_over:
                is_over = not runs.go_on()
                made = [training.record() for training in runs.trainings]
                every = furthest([*earlier, *made])
                records.write_json(options.out / "result.json", {**result, "trainings": every})
        finally:
            runs.stop()
        failed = [t for t in runs.trainings if t.status == records.FAILED]
        for training in failed:
            print(
                f"== {training.case.label} failed", *runner.tail(training.folder / "log"), sep="\n"
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
