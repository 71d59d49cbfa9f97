"""Hugging Face's Trainer with hytrain, with ZeRO-2 offload and without DeepSpeed: seconds a step.

    python experiments/hf_trainer/run.py --workloads 0.37B/4x512 0.95B/2x512 2.9B/8x1024 --out DIR
    python experiments/hf_trainer/run.py --workloads toy/2x16 --device cpu --out DIR

The systems of a workload run one after the other in a process of their own, --rounds times.
DIR/result.json is rewritten after every system, and a table is printed when all have run or
--budget-seconds are over.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.item_processes import describe_meanwhile, measure_items
from experiments.common.records import Json, write_json
from experiments.common.tables import markdown
from experiments.hf_trainer.systems import FORM, SYSTEMS, Workload

HEADER = ("workload", "system", "ms a step", "fastest", "over hytrain", "GPU GiB", "on the GPU")


def _command(
    workload: Workload, arguments: argparse.Namespace
) -> Callable[[Sequence[str]], list[str]]:
    worker = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    options = [f"--workload={workload}", f"--device={arguments.device}", "--systems"]
    return lambda systems: [*worker, *options, *systems]


def _measure(arguments: argparse.Namespace) -> Iterator[Json]:
    """Every workload, round and system, with its result."""
    deadline = time.monotonic() + arguments.budget_seconds
    for workload in arguments.workloads:
        for turn in range(arguments.rounds):
            found = measure_items(
                [system for system in SYSTEMS if system in arguments.systems],
                _command(workload, arguments),
                arguments.out / f"{workload}_{turn}.log".replace("/", "_"),
                deadline=deadline,
                item_seconds=arguments.system_seconds,
            )
            for system, result in found:
                run = {"workload": str(workload), "system": system, "turn": turn}
                yield run | {"result": result}


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
            table.append([workload, system, results[-1]["failed"], *[""] * (len(HEADER) - 3)])
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
    add("--budget-seconds", type=float, default=1800.0, help="after which it ends")
    add("--system-seconds", type=float, default=240.0, help="after which one counts as failed")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    hardware = describe_meanwhile(arguments.device)
    record: Json = {"command": sys.argv, "hardware": None, "runs": []}
    for run in _measure(arguments):
        record["hardware"] = hardware.result()
        record["runs"].append(run)
        write_json(arguments.out / "result.json", record)
        result = run["result"]
        print(f"{run['workload']} {run['system']}: {result.get('seconds', result)}", flush=True)
    print(markdown(HEADER, rows(record["runs"])))


if __name__ == "__main__":
    main()
