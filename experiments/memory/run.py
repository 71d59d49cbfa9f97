"""Predicted and measured memory, saves beside training, rates of saves, states that leave the GPU.

    python experiments/memory/run.py --out DIR
    python experiments/memory/run.py --out DIR --parts stall --sizes llama-0.4b --stages 2
    python experiments/memory/run.py --out DIR --device cpu --sizes toy --batch 2 --seq 16

Each size and ZeRO stage has a process of its own. Checkpoints are written to --folder, and removed
when the command has ended.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.report import Claim, gib, short, worst
from experiments.common.sizes import MODELS

PARTS = ("stall", "rates", "states", "cycles")
WITHIN = 1.03
"""Limit of measured over predicted memory."""
STALL, STATES = 0.02, 0.80


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, model=None, budget=240.0)
    add = parser.add_argument
    add("--folder", type=Path, help="for checkpoints; default: OUT/checkpoints")
    add("--sizes", nargs="+", default=["llama-0.4b", "llama-1b"], choices=MODELS)
    add("--stages", nargs="+", type=int, default=[2, 3], help="of ZeRO")
    add("--parts", nargs="+", default=["stall", "rates", "states"], choices=PARTS,
        help="beside the memory contract, which comes first")  # fmt: skip
    add("--gpu-fraction", default=0.25, type=runner.fraction)
    add("--saves", default=3, type=int, help="beside training")
    add("--cycles", default=200, type=int)
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each size and stage."""
    folder = (options.folder or options.out / "checkpoints").resolve()
    return [
        {
            **{"label": f"{model} ZeRO-{stage}", "worker": "experiments.memory.worker"},
            **{"system": "hytrain", "clip": 1.0, "gpu_fraction": options.gpu_fraction},
            **{"section": {"checkpoint": {"async": True}}, "seconds": 110.0},
            **runner.workload(options),
            **{"model": model, "stage": stage, "parts": options.parts, "saves": options.saves},
            **{"cycles": options.cycles, "checkpoints": str(folder)},
        }
        for stage in options.stages
        for model in options.sizes
    ]


def rows(result: Json) -> list[Json]:
    """A row for each phase and save of each job, and for its rates."""
    found: list[Json] = []
    for record in result["jobs"]:
        name: Json = {"case": record["label"]}
        if record["status"] != records.OK:
            found.append(name | {"what": "process"} | report.failure(record))
        for rank in record["ranks"]:
            found += [name | _phase(rank, phase) for phase in rank.get("measured", {})]
            found += [name | _save(save) for save in rank.get("saves", [])]
            for what, keys in (
                ("rates", ("save", "load", "write_1", "write_8", "read_1", "read_8")),
                ("states", ("offload", "offload_copy", "reload", "reload_copy")),
            ):
                rates = rank.get(what)
                if rates:
                    some = {f"{key}_gb_s": short(rates[key] / 1e9) for key in keys if key in rates}
                    bytes_ = {k: gib(v) for k, v in rates.items() if k.endswith("_gib")}
                    found.append(name | {"what": what} | some | bytes_)
            if "cycles" in rank:
                found.append(name | {"what": "cycles"} | rank["cycles"])
    return found


def _phase(rank: Json, phase: str) -> Json:
    """A phase's peaks over the predicted ones."""
    peak, said = rank["measured"][phase], rank["said"][phase]
    row: Json = {"what": phase, "seconds": short(peak["seconds"])}
    row["resident_gib"] = gib(peak["rss_bytes"])
    row["of_said"] = short(peak["rss_bytes"] / (said["host"] + said["pinned"]))
    if said["gpu"] is not None:
        # Activations are not predicted: they are added, or gradients in flight if these are more.
        beside = max(rank["activations"].get(phase) or 0, said.get("in_flight", 0))
        row["gpu_of_said"] = short(peak["gpu_bytes"] / (said["gpu"] + beside))
        if said["pinned"]:
            row["pinned_of_said"] = short(peak["pinned_bytes"] / said["pinned"])
    return row


def _save(save: Json) -> Json:
    times = {k: short(v) for k, v in save.items() if k.endswith("_ms") or k.endswith("_s")}
    return {
        "what": "save beside training",
        **times,
        "stall_of_a_step": short((save["call_ms"] + save["blocked_ms"]) / save["step_ms"]),
        "slower_by_steps": short(save["slower_by_steps"]),
        "ended": save["ended"],
    }


def claims(rows: Sequence[Json]) -> list[Claim]:
    """Each claim, decided by the worst of all cases."""

    def of(key: str, what: str | None = None) -> list[float | None]:
        return [row.get(key) for row in rows if what in (None, row["what"])]

    states = [
        row[f"{way}_gb_s"] / row[f"{way}_copy_gb_s"]
        for row in rows
        if row["what"] == "states"
        for way in ("offload", "reload")
    ]
    return [
        Claim("resident memory over what was said", worst(of("of_said")), WITHIN),
        Claim("the GPU's memory over what was said", worst(of("gpu_of_said")), WITHIN),
        Claim("a save's stall, of a step", worst(of("stall_of_a_step")), STALL),
        Claim("states that leave and come back, of a copy's rate", worst(states, at_least=True),
              STATES, at_least=True),
    ]  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Runs the command, and removes its checkpoints."""
    try:
        return runner.main(options, jobs(options), report.of_result(rows, claims))
    finally:
        shutil.rmtree(options.folder or options.out / "checkpoints", ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main(parse(sys.argv[1:])))
