"""Memory said and measured, saves beside training, rates of saves, states that leave the GPU.

    python experiments/memory/run.py --out DIR
    python experiments/memory/run.py --out DIR --parts stall --sizes llama-0.4b --stages 2
    python experiments/memory/run.py --out DIR --device cpu --sizes toy --batch 2 --seq 16

Each size and ZeRO stage has a process of its own, which builds an engine and says what it is at.
DIR/result.json is rewritten with every figure; tables come last. The command ends after
--budget-seconds, whatever hangs, with what it has. Checkpoints are written to --folder, and removed
when the command has ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.processes import REPOSITORY, free_port, tail
from experiments.common.records import Json, read_json, write_json
from experiments.common.sizes import SIZES
from experiments.memory.report import tables

_BEGUN = time.time()

PARTS = ("stall", "rates", "states", "cycles")
_LEAST_SECONDS = 20.0
"""That a process is begun with: imports, a small engine, and something to measure."""
_LAST_SECONDS = 4.0
"""Of the budget: tables."""
_LOOK_SECONDS = 0.5
_BYTES_A_PARAMETER = 14


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder for result.json and logs")
    add("--folder", type=Path, help="for checkpoints; default: OUT/checkpoints")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--sizes", default="llama-0.4b,llama-1b", help=", ".join(SIZES))
    add("--stages", default="2,3", help="ZeRO stages")
    add(
        "--parts",
        default="stall,rates,states",
        help=f"beside the memory contract, which comes first: {', '.join(PARTS)}",
    )
    add("--batch", default=8, type=int, help="sequences")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--gpu-fraction", default=0.25, type=float)
    add("--saves", default=3, type=int, help="beside training")
    add("--cycles", default=200, type=int)
    add(
        "--probe-gb", default=0.8, type=float, help="most that the disk's own rate is measured with"
    )
    add("--budget-seconds", default=240.0, type=float, help="in all")
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - {*PARTS, ""}
    if unknown:
        parser.error(f"--parts has {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    return options


def jobs(options: argparse.Namespace) -> list[Json]:
    """The processes' work, what matters most first."""
    return [
        {
            "name": f"{model}, ZeRO-{stage}",
            "model": model,
            "small": "toy",
            "stage": int(stage),
            "parts": options.parts.split(","),
            "gpu_fraction": options.gpu_fraction,
            "device": options.device,
            "batch": options.batch,
            "seq": options.seq,
            "cycles": options.cycles,
            "saves": options.saves,
            "async_seconds": 30.0,
            "checkpoint_bytes": _BYTES_A_PARAMETER * SIZES[model].num_parameters,
            "probe_bytes": int(options.probe_gb * 1e9),
            "folder": str((options.folder or options.out / "checkpoints").resolve()),
            "begun": _BEGUN,
        }
        for stage in options.stages.split(",")
        for model in options.sizes.split(",")
    ]


class _Paths(NamedTuple):
    job: Path
    result: Path
    log: Path


def _environment(device: str) -> dict[str, str]:
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    imports = [str(REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = {**os.environ, **single, **place, "PYTHONPATH": os.pathsep.join(imports)}
    if device == "cpu":
        # glibc would keep hundreds of MiB of gradients, which are a GPU's elsewhere, for later.
        env |= {
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
    return env


def run_job(options: argparse.Namespace, job: Json, end: float, result: Json) -> Json:
    """One process, its progress passed through; what it has written, also where it was ended.

    Args:
        options: of the command.
        job: the process's.
        end: time at which the process must have ended.
        result: of the command; written along with this case's figures as they come.
    """
    stem = options.out / job["name"].replace(", ", "_").lower()
    paths = _Paths(*(stem.with_suffix(f".{kind}") for kind in ("job", "result", "log")))
    # The process ends itself a second before, and says where it was.
    write_json(paths.job, {**job, "deadline": end - 1.0})
    paths.result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "experiments.memory.worker"]
    command += [str(paths.job.resolve()), str(paths.result.resolve())]
    begin = time.time()

    def found() -> Json:
        kept = read_json(paths.result) if paths.result.exists() else {"status": "nothing measured"}
        return {"job": job, "seconds": time.time() - begin, **kept}

    with paths.log.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=_environment(options.device),
            stdin=subprocess.DEVNULL, stderr=log, start_new_session=True,
        )  # fmt: skip
        while process.poll() is None and time.time() < end:
            time.sleep(_LOOK_SECONDS)
            result["cases"][job["name"]] = found()
            write_json(options.out / "result.json", result)
        if process.poll() is None:
            # Not waited for: giving gigabytes of pinned memory back may take it seconds.
            os.killpg(process.pid, signal.SIGKILL)
    case = found()
    if case["status"] == "begun":
        case["status"] = f"ended after {case['seconds']:.0f} s"
    if case["status"] != "ok":
        case["log"] = tail(paths.log, 40)
    return case


def _remove(folders: Iterable[Path]) -> None:
    """Removes what was saved, by a process that is not waited for: it may take it seconds."""
    paths = {
        str(path)
        for folder in folders
        for path in (folder, folder.with_name("disk"), folder.with_name("probe"))
    }
    subprocess.Popen(
        ["rm", "-rf", "--", *sorted(paths)], stdin=subprocess.DEVNULL, start_new_session=True
    )


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: that every process measured all that it had time for."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end = _BEGUN + options.budget_seconds - _LAST_SECONDS
    command = " ".join(["python experiments/memory/run.py", *arguments])
    result: Json = {"command": command, "cases": {}}
    for job in jobs(options):
        name = job["name"]
        if end - time.time() < _LEAST_SECONDS:
            print(f"{name}: left out, no time", flush=True)
            continue
        found = result["cases"][name] = run_job(options, job, end, result)
        write_json(options.out / "result.json", result)
        print(f"{name}: {found['status']}, {found['seconds']:.0f} s", flush=True)
        for line in found.get("log", []):
            print(f"  {line}", flush=True)
    print("\n".join(tables(result["cases"])), flush=True)
    _remove(Path(job["folder"]) for job in jobs(options))
    return 0 if all(case["status"] == "ok" for case in result["cases"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
