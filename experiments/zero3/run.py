"""ZeRO-3 beside ZeRO-2, with the weights on the GPUs or in host memory.

    python experiments/zero3/run.py --out DIR
    python experiments/zero3/run.py --ranks 2 --only stage2 stage3 unequal --out DIR
    python experiments/zero3/run.py --out DIR --device cpu --model toy --batch 2 --seq 16

Each mode has processes of its own, one a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.report import short
from experiments.common.sizes import size_of

MODES: dict[str, Json] = {
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "unequal": {"stage": 3},
    "streamed": {"streamed": True},
    # Less GPU memory than the weights need: one short sequence, activations recomputed.
    "capped": {"streamed": True},
    "capped_stage2": {"stage": 2},
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, budget=300.0)
    add = parser.add_argument
    add("--ranks", default=1, type=int, help="GPUs")
    add("--gpu-fraction", default=0.0, type=runner.fraction)
    add("--cap-share", default=0.9, type=float, help="GPU memory of the capped modes over weights")
    add("--warmup", default=3, type=int)
    add("--steps", default=3, type=int, help="of each of two timed windows")
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each mode; unequal shards only with several ranks."""
    found: list[Json] = []
    for mode, settings in MODES.items():
        job = {
            **{"label": mode, "worker": "experiments.common.bench", "ranks": options.ranks},
            **{"system": "hytrain", "clip": 1.0, "gpu_fraction": options.gpu_fraction},
            **{"warmup": options.warmup, "windows": 2, "steps": options.steps, "seconds": 30.0},
            **runner.workload(options),
            **settings,
        }
        if mode == "unequal":
            if options.ranks == 1:
                continue
            weights = [rank + 1.0 for rank in range(options.ranks)]
            job["section"] = {"shard_fractions": [w / sum(weights) for w in weights]}
        if mode.startswith("capped"):
            weights = 2 * size_of(options.model).num_parameters / records.GIB
            job |= {"batch": 1, "seq": min(512, options.seq), "checkpointing": True}
            job |= {"built": "host", "cap_gib": options.cap_share * weights}
        found.append(job)
    return found


def rows(result: Json) -> list[Json]:
    """A row for each mode."""
    first: dict[str, Json] = {r["label"]: r["ranks"][0] for r in result["jobs"] if r["ranks"]}
    base = first.get("stage2", {}).get("losses")
    found: list[Json] = []
    for record in result["jobs"]:
        row = {"mode": record["label"], "gpus": len(record["ranks"]), "status": record["status"]}
        found.append(row | report.timed_row(record))
        if record["status"] != records.OK:
            continue
        row = found[-1]
        row.pop("tflops")
        if "cap_gib" in record["job"]:
            row["cap_gib"] = short(record["job"]["cap_gib"])
        elif base is not None:
            pairs = zip(record["ranks"][0]["losses"], base, strict=True)
            most = max(abs(ours - theirs) for ours, theirs in pairs)
            row["largest_loss_difference_to_stage2"] = short(most, 3)
    return found


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows)))
