"""A machine of eight GPUs: dense models, weak scaling, a mixture, and a sequence that all share.

    python experiments/eight_gpus/run.py --part dense --out DIR
    python experiments/eight_gpus/run.py --part dense --gpus 2 --toy --out DIR       # on a CPU

Each part takes ten minutes at most. It runs other experiments' commands, one after another, and
copies what each has written to DIR as soon as it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import runner

HERE = Path(__file__).resolve().parents[1]
SCALING = "weak_scaling/run.py --checkpointing"
PARTS: dict[str, dict[str, str]] = {
    # 50 blocks are 41 B, 25 are 21 B.
    "dense": {
        "21b": "{all_gpus} --layers {few} --slowness 2 "
        "--systems hytrain_zero3 forward_backward zero3",
        "41b": "{all_gpus} --layers {many} --slowness 3 --moments bf16 "
        "--systems hytrain_zero3 forward_backward",
    },
    "scaling": {
        "8b": "{some_gpus} --slowness 1.5 --systems hytrain hytrain_zero3 forward_backward fsdp2",
    },
    "mixture": {
        "30b": "mixture/run.py --batch 4 {mixture} --moments fp32 --master-weights fp32 --steps 24",
    },
    "context": {
        "8b": "long_context/run.py --part shared --gpus {gpus} {context} --job-seconds 250",
    },
}
"""Name of a result -> the command that makes it."""
REAL = {
    "all_gpus": f"{SCALING} --gpus {{gpus}} --sizes {{gpus}} --model llama-41b",
    "some_gpus": f"{SCALING} --gpus {{gpus}} --sizes {{sizes}} --model llama-8b",
    "few": "25",
    "many": "50",
    "mixture": "--seq 4096",
    "context": "--times 131072 --only 'hytrain fp32'",
}
"""8 x 1024 tokens a GPU, except for the mixture and the long sequence."""
_TOY = "--device cpu --model toy"
TOY = {
    "all_gpus": f"{SCALING} --gpus {{gpus}} --sizes {{gpus}} --batch 2 --seq 16 {_TOY}",
    "some_gpus": f"{SCALING} --gpus {{gpus}} --sizes {{sizes}} --batch 2 --seq 16 {_TOY}",
    **{"few": "2", "many": "3", "mixture": "--toy --seq 16 --blocks 2"},
    "context": f"{_TOY} --host-gib 9 --only 'hytrain fp32'",
}
CLOSING_SECONDS = 15.0
"""Seconds that a command has to end its jobs."""


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Name of each result of the part -> its command, without output folder and time limit."""
    halves = [options.gpus >> n for n in range(options.gpus.bit_length())]
    sizes = {"gpus": str(options.gpus), "sizes": ",".join(map(str, halves))}
    values = {name: text.format(**sizes) for name, text in (TOY if options.toy else REAL).items()}
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {options.gpus}"
    found: dict[str, list[str]] = {}
    for name, text in PARTS[options.part].items():
        script, *arguments = shlex.split(text.format(**values, **sizes))
        before = launcher.split() if options.part == "mixture" else []
        found[name] = [sys.executable, *before, str(HERE / script), *arguments]
    return found


def run(command: Sequence[str], log: Path, seconds: float) -> int:
    """Runs a command; returns its exit status, or 1 if it took too long and was ended."""
    process = runner.start(command, dict(os.environ), log)
    try:
        code = process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        # Not SIGKILL first: its ranks have sessions of their own, which it ends itself.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLOSING_SECONDS)
        code = 1
    runner.stop(process)
    print(*runner.tail(log), sep="\n", flush=True)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a part; the exit status is that of its last command that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", required=True, choices=PARTS)
    add("--out", required=True, type=Path)
    add("--gpus", default=8, type=int)
    add("--seconds", default=570.0, type=float, help="for the part")
    add("--toy", action="store_true", help="toy models on CPU ranks")
    options = parser.parse_args(arguments)
    end, status = time.monotonic() + options.seconds, 0
    options.out = options.out.resolve()  # commands run in the repository's folder
    options.out.mkdir(parents=True, exist_ok=True)
    for name, command in commands(options).items():
        left = end - time.monotonic() - CLOSING_SECONDS
        folder = options.out / f"{options.part}_{name}"
        limit = "--seconds" if options.part == "mixture" else "--budget-seconds"
        call = [*command, "--out", str(folder), limit, f"{max(0.0, left):.0f}"]
        print(shlex.join(call), flush=True)
        status = run(call, folder.with_suffix(".log"), left + CLOSING_SECONDS) or status
        if (folder / "result.json").exists():
            shutil.copy(folder / "result.json", options.out / f"{options.part}_{name}.json")
    return status


if __name__ == "__main__":
    sys.exit(main())
