"""A step of 4 micro-batches: forward and backward only, layer-major, micro-batch-major, in turns.

    python experiments/layer_major/run.py --out DIR
    python experiments/layer_major/run.py --out DIR --device cpu --model toy --batch 2 --seq 16

Each mode is a process of its own, --rounds times. That all modes have the same gradients is tested
(tests/unit/layer_major).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.report import Claim, ratio, short

REFERENCE = "forward and backward only, checkpointed blocks"
MOST_OVER_REFERENCE = 1.08
"""Limit of layer-major's step over forward and backward, both recomputing the inside of layers."""
_BARE: Json = {"system": "forward_backward"}
MODES: dict[str, Json] = {
    REFERENCE: {**_BARE, "checkpointing": True},
    "forward and backward only": _BARE,
    **{
        f"layer-major, activations: {kind}": {
            "section": {"accumulation": "layer_major", "activations": kind}
        }
        for kind in ("keep", "offload")
    },
    "micro-batch-major, checkpointed blocks": {"checkpointing": True},
    "micro-batch-major": {},
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__)
    add = parser.add_argument
    add("--micro-batches", default=4, type=int, help="of a step")
    add("--gpu-fraction", default=0.0, type=runner.fraction)
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add("--rounds", default=2, type=int, help="turns of every mode")
    add("--steps", default=2, type=int, help="timed steps of a turn; one more before them is not")
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for every mode, then for every mode again."""
    return [
        {
            **{"label": f"{mode}, turn {turn}", "mode": mode, "seconds": 40.0},
            **{"worker": "experiments.common.bench", "system": "hytrain", "train_batch": True},
            **{"gpu_fraction": options.gpu_fraction, "clip": options.clip},
            **{"accumulation": options.micro_batches, "steps": options.steps},
            **{"warmup": 1, "windows": 1},
            **runner.workload(options),
            **settings,
        }
        for turn in range(1, options.rounds + 1)
        for mode, settings in MODES.items()
    ]


def rows(result: Json) -> list[Json]:
    """A row for each mode; the engine's own statistics are those of the last turn."""
    turns: dict[str, list[Json]] = {}
    failed: list[Json] = []
    for record in result["jobs"]:
        mode = record["job"]["mode"]
        if record["status"] == records.OK:
            turns.setdefault(mode, []).append(record["ranks"][0])
        else:
            failed.append({"mode": record["label"], **report.failure(record)})
    seconds = {m: statistics.median(t["step_seconds"] for t in each) for m, each in turns.items()}
    found: list[Json] = []
    for mode, each in turns.items():
        row: Json = {"mode": mode, "step_s": short(seconds[mode], 5)}
        row["turn_s"] = [short(turn["step_seconds"], 5) for turn in each]
        row["over_reference"] = short(ratio(seconds[mode], seconds.get(REFERENCE)))
        row["tflops"] = short(each[-1]["tflops"])
        row["peak_gpu_gib"] = report.peak_gib(each)
        if each[-1]["observations"]:
            said = each[-1]["observations"][-1]
            row["update_s"] = short(said["update_seconds"])
            row["exposed_s"] = short(said["exposed_seconds"])
            row["clip_coefficient"] = short(said["clip_coefficient"])
        found.append(row)
    return found + failed


def claims(rows: Sequence[Json]) -> list[Claim]:
    """The claims of every run."""
    return [
        Claim(
            f"{row.get('run', '')}: {row['mode']}: over forward and backward, both recomputing",
            row.get("over_reference"),
            MOST_OVER_REFERENCE,
        )
        for row in rows
        if row["mode"].startswith("layer-major")
    ]


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows, claims)))
