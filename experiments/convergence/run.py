"""Loss curves of several trainings at once, on one GPU: losses do not depend on time.

    python experiments/convergence/run.py --out out/convergence

Each training is a process of train_lm's script, on cores of its own; the next one starts where
enough are free. What they have reached is written to `result.json` again and again, so that a run
that is cut keeps its curves, and `--resume` goes on with those that had not ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import hardware, processes, records
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

TRAIN = processes.REPOSITORY / "experiments" / "train_lm" / "train.py"
MODEL = Path(__file__).with_name("llama_97m.json")
RECORDED = ("model", "steps", "schedule_steps", "lr", "micro_batch", "seq_len")
"""Options that the result has."""
WRITE_SECONDS = 10.0
"""Between two writes of the result, and two looks at what starts, rests and goes on."""
MARGIN_SECONDS = 20.0
"""Before the end, when what is wanted first should be reached."""


@dataclasses.dataclass
class Training:
    """A case's process, and what it has reached."""

    case: Case
    folder: Path
    process: subprocess.Popen[bytes]
    steps: int
    """Of its schedule."""
    cores: list[int]
    started: float
    curve: Curve = dataclasses.field(default_factory=Curve)
    looks: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    """When the curve was read, and its steps then."""
    status: str = "running"
    seconds: float = 0.0
    """From its start to its end."""
    rests: bool = False

    def look(self, now: float) -> None:
        """Read the curve, and find out whether it has ended."""
        if self.status != "running":
            return
        self.curve = read_curve(self.folder / "metrics.jsonl")
        if self.curve.losses:
            self.looks.append((now, len(self.curve.losses)))
        self.seconds = now - self.started
        if self.missing == 0:
            self.stop("ok")
        elif self.process.poll() is not None:
            self.status = "failed"

    @property
    def missing(self) -> int:
        """Steps that are wanted yet; with the evaluation behind the last of them."""
        enough = round(self.steps * self.case.enough)
        left = enough - len(self.curve.losses)
        # Of a training that is ended before its schedule, the next step says that it is over.
        return max(0, left) or int(str(enough) not in self.curve.held_out)

    def ends_at(self, now: float) -> float:
        """When it will end, by its speed of the last looks."""
        (then, before), (_, steps) = self.looks[-4:][0], self.looks[-1]
        return now + self.missing * (now - then) / max(steps - before, 1e-9)

    def rest(self, rests: bool) -> None:
        """Halt the process, or let it go on; losses do not depend on time."""
        if self.status == "running" and rests is not self.rests:
            os.killpg(self.process.pid, signal.SIGSTOP if rests else signal.SIGCONT)
            self.rests = rests

    def stop(self, status: str) -> None:
        """End it; its curve so far stays."""
        if self.status == "running":
            processes.stop(self.process)
            self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all; the exit status is 1 where a training failed."""
    options = make_parser().parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    earlier = [] if options.resume is None else records.read_json(options.resume)["trainings"]
    had = {(t["kind"], t["seed"]) for t in earlier if t["status"] == "ok"}
    cases = [
        as_asked(c, options)
        for c in all_cases()
        if (c.kind, c.seed) not in had
        and (not options.only or any(o in c.label for o in options.only))
    ]
    result: Json = {
        "command": "run.py " + " ".join(sys.argv[1:]),
        "hardware": hardware.describe(options.device),
        "options": {k: getattr(options, k) for k in RECORDED},
    }
    # A command's limit sends SIGTERM: the processes, each in a session of its own, would go on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        runs = Runs(cases, options, Path(scratch))
        try:
            while runs.go_on():
                write(earlier, runs.trainings, options.out, result)
        finally:
            runs.stop()
            write(earlier, runs.trainings, options.out, result)
        failed = [t for t in runs.trainings if t.status == "failed"]
        for training in failed:
            print(f"== {training.case.label} failed", *processes.tail(_log(training)), sep="\n")
    return 1 if failed else 0


def as_asked(case: Case, options: argparse.Namespace) -> Case:
    """The case with what the command line says of it."""
    cores = options.hytrain_cores if case.engine == "hytrain" else case.cores
    is_first = case.is_first and not options.together
    return dataclasses.replace(case, cores=cores, is_first=is_first)


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else "",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/convergence"))
    add("--only", nargs="+", default=[], help="cases whose label has one of these words")
    add("--together", action="store_true", help="none rests for those that are wanted first")
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


class Runs:
    """The cases that wait, those that run, and the cores that are free."""

    def __init__(self, cases: Sequence[Case], options: argparse.Namespace, scratch: Path) -> None:
        self.trainings: list[Training] = []
        self._waiting = list(cases)
        self._options = options
        self._scratch = scratch
        self._begin = time.monotonic()
        self._until = self._begin + options.limit_seconds
        self._free = sorted(os.sched_getaffinity(0))
        self._num_cores = len(self._free)
        self._environment = environment(options.device)

    def go_on(self) -> bool:
        """Start what there are cores for, and wait; False once all is over."""
        self.start()
        waited = min(time.monotonic() + WRITE_SECONDS, self._until)
        while time.monotonic() < waited:
            if any(t.process.poll() is not None for t in self._running()):
                break
            time.sleep(0.2)
        now = time.monotonic()
        for training in self.trainings:
            was_running = training.status == "running"
            training.look(now)
            if was_running and training.status != "running":
                self._free = sorted([*self._free, *training.cores])
        self.let_first_ones_pass(now)
        steps = ", ".join(
            f"{t.case.label}{' (rests)' if t.rests else ''} {len(t.curve.losses)}"
            for t in self._running()
        )
        print(f"{now - self._begin:4.0f} s: {steps}", flush=True)
        return now < self._until and bool(self._running() or self._waiting)

    def _running(self) -> list[Training]:
        return [t for t in self.trainings if t.status == "running"]

    def stop(self) -> None:
        """End all."""
        for training in self.trainings:
            training.stop("stopped")

    def start(self) -> None:
        """In their order, one that needs more cores than are free before those behind it."""
        ended = [t.seconds for t in self.trainings if t.status == "ok"]
        left = self._until - time.monotonic()
        if ended and left < min(ended):
            self._waiting.clear()  # they would not come to their end
        for case in list(self._waiting):
            needed = min(case.cores, self._num_cores)
            if needed > len(self._free):
                return
            cores = [self._free.pop() for _ in range(needed)]
            self._waiting.remove(case)
            folder = self._scratch / f"run{len(self.trainings)}"
            self.trainings.append(self._process(case, cores, folder))

    def _process(self, case: Case, cores: list[int], folder: Path) -> Training:
        folder.mkdir()
        options = self._options
        threads = max(1, len(cores) - 1)
        config = ds_config(
            case, micro_batch=options.micro_batch, cpu_threads=threads,
            on_gpu=options.device == "cuda", schedule_steps=options.schedule_steps, lr=options.lr,
        )  # fmt: skip
        records.write_json(folder / "config.json", config)
        command = [
            sys.executable, str(TRAIN), "--engine", case.engine,
            "--deepspeed_config", str(folder / "config.json"), "--out", str(folder / "out"),
            "--model", options.model, "--attention", case.attention, "--seed", str(case.seed),
            "--steps", str(options.steps), "--seq-len", str(options.seq_len),
            "--eval-every", str(options.eval_every),
            "--eval-sequences", str(options.eval_sequences),
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=processes.REPOSITORY,
                env={**self._environment, "OMP_NUM_THREADS": str(threads)},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=functools.partial(os.sched_setaffinity, 0, cores),
            )
        return Training(case, folder / "out", process, options.steps, cores, time.monotonic())

    def let_first_ones_pass(self, now: float) -> None:
        """Where what is wanted first would be late, the others rest."""
        first = [t for t in self._running() if t.case.is_first and len(t.looks) > 1]
        late = max((t.ends_at(now) for t in first), default=now) > self._until - MARGIN_SECONDS
        for training in self._running():
            if not training.case.is_first:
                training.rest(late)


def environment(device: str) -> dict[str, str]:
    """Of a training: this repository first on the path, DeepSpeed's extensions in one folder."""
    environment = dict(os.environ)
    paths = [str(processes.REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])]
    environment.update(
        PYTHONPATH=os.pathsep.join(paths),
        OMP_NUM_THREADS="1",
        TORCH_EXTENSIONS_DIR=processes.extensions_dir(),
    )
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if device == "cpu":
        environment.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    return environment


def _log(training: Training) -> Path:
    return training.folder.parent / "log"


def write(earlier: Sequence[Json], trainings: Sequence[Training], out: Path, result: Json) -> None:
    """Of a training that was made twice, what came further."""
    curves = [
        {
            **dataclasses.asdict(t.case), "status": t.status, "seconds": round(t.seconds, 1),
            **dataclasses.asdict(t.curve),
        }
        for t in trainings
    ]  # fmt: skip
    furthest: dict[tuple[str, int], Json] = {}
    for training in [*earlier, *curves]:
        case = training["kind"], training["seed"]
        if case not in furthest or len(training["losses"]) > len(furthest[case]["losses"]):
            furthest[case] = training
    records.write_json(out / "result.json", {**result, "trainings": list(furthest.values())})


if __name__ == "__main__":
    sys.exit(main())
