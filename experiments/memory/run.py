"""Memory said and measured, states that leave the GPU, saves beside training, rates of saves.

    python experiments/memory/run.py --out DIR
    python experiments/memory/run.py --out DIR --device cpu --sizes toy --batch 2 --seq 16

Each size and ZeRO stage has a process of its own. DIR/result.json is rewritten after each; tables
come last. Checkpoints are written to --folder and removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.hardware import describe
from experiments.common.processes import REPOSITORY, free_port, run_process, tail
from experiments.common.records import Json, read_json, write_json
from experiments.common.sizes import SIZES
from experiments.memory.report import tables

_START_SECONDS = 25.0
"""Imports, and a small engine."""
_BYTES_A_PARAMETER = 14
_ASSUMED_DISK = 0.8e9


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder for result.json and logs")
    add("--folder", type=Path, help="for checkpoints; default: OUT/checkpoints")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--sizes", default="llama-1b,llama-3b", help=", ".join(SIZES))
    add("--stages", default="2,3", help="ZeRO stages")
    add("--batch", default=8, type=int, help="sequences")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--gpu-fraction", default=0.25, type=float, help="of the contract")
    add("--cycles", default=200, type=int)
    add(
        "--probe-gb", default=6.0, type=float, help="most that the disk's own rate is measured with"
    )
    add("--budget-seconds", default=235.0, type=float, help="in all")
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """The processes' work, what matters most first."""
    found: list[Json] = []
    for stage in map(int, options.stages.split(",")):
        for number, model in enumerate(options.sizes.split(",")):
            size = _BYTES_A_PARAMETER * SIZES[model].num_parameters
            parts = ["contract"]
            if stage == 2:
                parts = ["contract", "async", *(["cycles"] if number == 0 else [])]
            found.append(
                {
                    "name": f"{model}, ZeRO-{stage}",
                    "model": model,
                    "small": "toy" if options.device == "cpu" else "llama-100m",
                    "stage": stage,
                    "parts": parts,
                    "async_fractions": ["solve", "0.0"] if number == 0 else ["solve"],
                    "gpu_fraction": options.gpu_fraction,
                    "device": options.device,
                    "batch": options.batch,
                    "seq": options.seq,
                    "cycles": options.cycles,
                    "solve_steps": 24,
                    "async_seconds": 8.0 + 1.5 * size / _ASSUMED_DISK,
                    "probe_bytes": int(options.probe_gb * 1e9),
                    "least_seconds": {"save": 4.0 + 1.5 * size / _ASSUMED_DISK},
                    "folder": str((options.folder or options.out / "checkpoints").resolve()),
                }
            )
    return found


def run_job(options: argparse.Namespace, job: Json, limit: float) -> Json:
    """One process; what it has written so far where it is ended at its limit."""
    stem = options.out / job["name"].replace(", ", "_").lower()
    paths = {kind: stem.with_suffix(f".{kind}") for kind in ("job", "result", "log")}
    write_json(paths["job"], {**job, "seconds": limit - 5.0})
    paths["result"].unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.memory.worker"]
    command += [str(paths[kind].resolve()) for kind in ("job", "result")]
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    imports = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {**os.environ, **single, **place, "PYTHONPATH": os.pathsep.join(imports)}
    if options.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    begin = time.monotonic()
    code = run_process(command, env, paths["log"], limit)
    found: Json = {"status": "nothing measured"}
    if paths["result"].exists():
        found = read_json(paths["result"])
    if code is None:
        found["status"] += f"; ended after {limit:.0f} s"
    if found["status"] != "ok":
        found["log"] = tail(paths["log"], 30)
    shutil.rmtree(job["folder"], ignore_errors=True)
    return {"job": job, "seconds": time.monotonic() - begin, **found}


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: that every process measured all that it had time for."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget_seconds
    command = " ".join(["python experiments/memory/run.py", *arguments])
    result: Json = {"command": command, "hardware": describe(options.device), "cases": {}}
    for job in jobs(options):
        left = end - time.monotonic()
        if left < _START_SECONDS:
            print(f"{job['name']}: left out, no time", flush=True)
            continue
        found = result["cases"][job["name"]] = run_job(options, job, left)
        write_json(options.out / "result.json", result)
        print(f"{job['name']}: {found['status']}, {found['seconds']:.0f} s", flush=True)
        for line in found.get("left_out", []):
            print(f"  left out: {line}", flush=True)
        for line in found.get("log", []):
            print(f"  {line}", flush=True)
    print("\n".join(tables(result["cases"])))
    return 0 if all(case["status"] == "ok" for case in result["cases"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
