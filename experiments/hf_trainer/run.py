"""Hugging Face's Trainer with hytrain, with ZeRO-2 offload and without DeepSpeed: seconds a step.

    python experiments/hf_trainer/run.py --workloads 0.37B/4x512 0.95B/2x512 2.9B/8x1024 --out DIR
    python experiments/hf_trainer/run.py --workloads toy/2x16 --device cpu --out DIR

Each system of a workload is a process of its own (accelerate's state is one a process), one after
the other, --rounds times; every other round in the opposite order. DIR/result.json is rewritten
after every process, and a table is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.hardware import describe
from experiments.common.processes import REPOSITORY, extensions_dir, free_port
from experiments.common.records import Json, write_json
from experiments.common.tables import markdown
from experiments.hf_trainer.systems import FORM, MARK, SYSTEMS, Workload

HEADER = ("workload", "system", "ms a step", "fastest", "over hytrain", "GPU GiB", "on the GPU")


def _process(workload: Workload, system: str, arguments: argparse.Namespace, name: str) -> Json:
    environment = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCH_EXTENSIONS_DIR": extensions_dir(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.getenv("PYTHONPATH")])),
    }
    own = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    own += ["--workload", str(workload), "--system", system, "--device", arguments.device]
    log = arguments.out / f"{name}.log"
    with log.open("w") as errors:
        done = subprocess.run(
            own, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not results:
        return {"failed": done.returncode, "log": log.read_text()[-2000:]}
    return json.loads(results[-1][len(MARK) :])


def rows(runs: list[Json]) -> list[list[str]]:
    """Of the table: each workload and system once, the median of its rounds."""
    found: dict[tuple[str, str], list[Json]] = {}
    for run in runs:
        found.setdefault((run["workload"], run["system"]), []).append(run["result"])

    def seconds(workload: str, system: str) -> float | None:
        taken = [r["seconds"] for r in found.get((workload, system), []) if "seconds" in r]
        return statistics.median(taken) if taken else None

    table: list[list[str]] = []
    for (workload, system), results in found.items():
        own, base = seconds(workload, system), seconds(workload, "hytrain")
        if own is None:
            table.append([workload, system, "failed: see its log", *[""] * (len(HEADER) - 3)])
            continue
        last = [result for result in results if "seconds" in result][-1]
        fastest = min(result["fastest"] for result in results if "seconds" in result)
        table.append([
            workload,
            system,
            f"{1e3 * own:.1f}",
            f"{1e3 * fastest:.1f}",
            f"{own / base:.2f}" if base else "-",
            f"{last['gpu_gib']:.1f}" if last["gpu_gib"] else "-",
            last["gpu_layers"] or "",
        ])  # fmt: skip
    return table


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workloads", nargs="+", required=True, type=Workload.of, metavar="WORKLOAD", help=FORM)
    add("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    add("--out", type=Path, required=True, help="folder for result.json and logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record: Json = {"command": sys.argv, "hardware": describe(arguments.device), "runs": []}
    for workload in arguments.workloads:
        for turn in range(arguments.rounds):
            for system in arguments.systems if turn % 2 == 0 else reversed(arguments.systems):
                name = f"{workload}_{system}_{turn}".replace("/", "_")
                result = _process(workload, system, arguments, name)
                run = {"workload": str(workload), "system": system, "turn": turn, "result": result}
                record["runs"].append(run)
                write_json(arguments.out / "result.json", record)
                print(f"{name}: {result.get('seconds', result)}", flush=True)
    print(markdown(HEADER, rows(record["runs"])))


if __name__ == "__main__":
    main()
