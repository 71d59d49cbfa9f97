"""Loss curves of many trainings at once, on one GPU: losses do not depend on time.

    python experiments/convergence/run.py --out out/convergence

Each training is a process of train_lm's script. What they have reached is written to
`result.json` again and again, so that a run that is cut keeps its curves; report.py reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from experiments.convergence.cases import Case, all_cases, ds_config
from experiments.convergence.curves import Curve, read_curve

TRAIN = processes.REPOSITORY / "experiments" / "train_lm" / "train.py"
MODEL = Path(__file__).with_name("llama_97m.json")
WRITE_SECONDS = 10.0
"""Between two writes of the result, and two looks at who will be late."""
SHED_AFTER_SECONDS = 90.0
"""By when all have started, and their speed can be told."""


@dataclasses.dataclass
class Training:
    """A case's process, and what it has reached."""

    case: Case
    folder: Path
    process: subprocess.Popen[bytes]
    steps: int
    """Of its schedule."""
    curve: Curve
    last: tuple[float, int] = (0.0, 0)
    """When the curve was last read, and its steps then."""
    status: str = "running"

    def look(self, now: float) -> float:
        """Read the curve.

        Returns:
            Steps a second since the last look.
        """
        before, steps = self.last
        self.curve = read_curve(self.folder / "metrics.jsonl")
        self.last = (now, len(self.curve.losses))
        if self.status == "running" and self.process.poll() is not None:
            self.status = "ok" if self.process.returncode == 0 else "failed"
        elif self.missing == 0:
            self.stop("ok")
        return (len(self.curve.losses) - steps) / max(now - before, 1e-9)

    @property
    def missing(self) -> int:
        """Steps that are wanted yet; with the evaluation behind the last of them."""
        enough = round(self.steps * self.case.enough)
        left = enough - len(self.curve.losses)
        # Of a training that is ended before its schedule, the next step says that it is over.
        return max(0, left) or int(str(enough) not in self.curve.held_out)

    def stop(self, status: str) -> None:
        """End it; its curve so far stays."""
        if self.status == "running":
            processes.stop(self.process)
            self.status = status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all; the exit status is 1 where a training failed."""
    options = _parser().parse_args(argv)
    cases = [c for c in all_cases() if not options.only or any(o in c.label for o in options.only)]
    options.out.mkdir(parents=True, exist_ok=True)
    result: Json = {
        "command": "run.py " + " ".join(sys.argv[1:]),
        "hardware": hardware.describe(options.device),
        "options": {k: getattr(options, k) for k in ("model", "steps", "micro_batch", "seq_len")},
    }
    until = time.monotonic() + options.limit_seconds
    # A command's limit sends SIGTERM: the processes, each in a session of its own, would go on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        trainings: list[Training] = []
        try:
            _start_all(cases, options, Path(scratch), trainings)
            _follow(trainings, options, result, until)
        finally:
            for training in trainings:
                training.stop("stopped")
            _write(trainings, options.out, result)
        failed = [t for t in trainings if t.status == "failed"]
        for training in failed:
            print(f"== {training.case.label} failed", *processes.tail(_log(training)), sep="\n")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
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
    add("--micro-batch", type=int, default=4)
    add("--seq-len", type=int, default=256)
    add("--eval-every", type=int, default=500)
    add("--eval-sequences", type=int, default=256)
    add("--zero2-threads", type=int, default=8, help="of DeepSpeed's CPU Adam")
    add("--limit-seconds", type=float, default=320.0, help="after which all are ended")
    return parser


def _start_all(
    cases: Sequence[Case], options: argparse.Namespace, scratch: Path, into: list[Training]
) -> None:
    """Start all; those of DeepSpeed's CPU Adam once it is compiled: the others train already."""
    environment = _environment(options.device)
    adam = subprocess.Popen(
        [sys.executable, "-m", "experiments.common.prepare", "adam"],
        cwd=processes.REPOSITORY,
        env=environment,
        start_new_session=True,
    )
    try:
        for case in sorted(cases, key=_needs_adam):
            if _needs_adam(case) and adam.wait():
                print("DeepSpeed's CPU Adam was not compiled", flush=True)
            into.append(_start(case, options, scratch / f"run{len(into)}", environment))
    finally:
        if adam.poll() is None:
            processes.stop(adam)


def _needs_adam(case: Case) -> bool:
    return case.engine == "deepspeed" and case.offload


def _environment(device: str) -> dict[str, str]:
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


def _start(
    case: Case, options: argparse.Namespace, folder: Path, environment: dict[str, str]
) -> Training:
    folder.mkdir()
    on_gpu = options.device == "cuda"
    config = ds_config(case, micro_batch=options.micro_batch, cpu_threads=1, on_gpu=on_gpu)
    records.write_json(folder / "config.json", config)
    # The slowest has the cores first.
    polite = [] if _needs_adam(case) else ["nice", "-n", "10"]
    command = [
        *polite, sys.executable, str(TRAIN), "--engine", case.engine,
        "--deepspeed_config", str(folder / "config.json"), "--out", str(folder / "out"),
        "--model", options.model, "--attention", case.attention, "--seed", str(case.seed),
        "--steps", str(options.steps), "--seq-len", str(options.seq_len),
        "--eval-every", str(options.eval_every), "--eval-sequences", str(options.eval_sequences),
    ]  # fmt: skip
    threads = options.zero2_threads if _needs_adam(case) else 1
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=processes.REPOSITORY,
            env={**environment, "OMP_NUM_THREADS": str(threads)},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return Training(case, folder / "out", process, options.steps, Curve())


def _log(training: Training) -> Path:
    return training.folder.parent / "log"


def _follow(
    trainings: list[Training], options: argparse.Namespace, result: Json, until: float
) -> None:
    """Wait for all; end the optional ones where a needed one would come too late."""
    begin = time.monotonic()
    while True:
        waited = time.monotonic()
        while time.monotonic() < min(waited + WRITE_SECONDS, until):
            if all(t.process.poll() is not None for t in trainings if t.status == "running"):
                break
            time.sleep(0.2)
        now = time.monotonic()
        speeds = [training.look(now) for training in trainings]
        _write(trainings, options.out, result)
        steps = " ".join(str(len(t.curve.losses)) for t in trainings)
        print(f"{now - begin:4.0f} s, steps: {steps}", flush=True)
        if now >= until or all(t.status != "running" for t in trainings):
            return
        optional = [t for t in trainings if t.case.optional and t.status == "running"]
        is_late = any(
            now + t.missing / max(speed, 1e-9) > until
            for t, speed in zip(trainings, speeds, strict=True)
            if t.status == "running" and not t.case.optional
        )
        if optional and is_late and now - begin > SHED_AFTER_SECONDS:
            print(f"ended, so that others are in time: {optional[-1].case.label}", flush=True)
            optional[-1].stop("left out")


def _write(trainings: Sequence[Training], out: Path, result: Json) -> None:
    curves = [
        {**dataclasses.asdict(t.case), "status": t.status, **dataclasses.asdict(t.curve)}
        for t in trainings
    ]
    records.write_json(out / "result.json", {**result, "trainings": curves})


if __name__ == "__main__":
    sys.exit(main())
