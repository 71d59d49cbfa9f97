"""Hugging Face's Trainer with hytrain, with ZeRO-2 offload and without DeepSpeed: seconds a step.

    python experiments/hf_trainer/run.py --workloads 0.37B/4x512 0.95B/2x512 2.9B/8x1024 --out DIR
    python experiments/hf_trainer/run.py --workloads toy/2x16 --device cpu --out DIR

Each system of a workload has a process of its own, one after the other, --rounds times.
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
from experiments.common.report import ratio, short
from experiments.common.sizes import MODELS

FORM = "MODEL/BATCHxTOKENS"
_DEEPSPEED: Json = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "steps_per_print": 10**9,
}
SYSTEMS: dict[str, Json] = {
    # bf16 autocast, fp32 weights, torch's fused AdamW.
    "trainer_alone": {"config": None, "warmup": 10, "steps": 20},
    "zero2_offload": {"config": _DEEPSPEED, "warmup": 4, "steps": 8},
    # k is solved in the first 60 steps.
    "hytrain": {"config": {**_DEEPSPEED, "hytrain": {}}, "warmup": 70, "steps": 20},
}


def _workload(text: str) -> Json:
    """Parses a text of FORM."""
    try:
        model, shape = text.split("/")
        batch, tokens = map(int, shape.split("x"))
        if model not in MODELS:
            raise ValueError
    except ValueError:
        message = f"{text!r} is not {FORM} with a model of {', '.join(MODELS)}"
        raise argparse.ArgumentTypeError(message) from None
    return {"workload": text, "model": model, "batch": batch, "seq": tokens}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, model=None, budget=1800.0)
    add = parser.add_argument
    add("--workloads", nargs="+", required=True, type=_workload, metavar="WORKLOAD", help=FORM)
    add("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    add("--rounds", type=int, default=1)
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for every workload, round and system."""
    return [
        {
            "label": f"{workload['workload']} {system}" + (f" {turn}" if turn > 1 else ""),
            **{"worker": "experiments.hf_trainer.worker", "device": options.device},
            **{"system": system, "seconds": 95.0},
            **workload,
            **SYSTEMS[system],
        }
        for workload in options.workloads
        for turn in range(1, options.rounds + 1)
        for system in options.systems
    ]


def rows(result: Json) -> list[Json]:
    """A row for each workload and system, with the median of its rounds."""
    found: dict[tuple[str, str], list[Json]] = {}
    for record in result["jobs"]:
        key = record["job"]["workload"], record["job"]["system"]
        found.setdefault(key, []).append(record)
    seconds = {
        key: statistics.median(taken)
        for key, some in found.items()
        if (taken := [r["ranks"][0]["seconds"] for r in some if r["status"] == records.OK])
    }
    table: list[Json] = []
    for (workload, system), some in found.items():
        row: Json = {"workload": workload, "system": system}
        table.append(row)
        measured = [r["ranks"][0] for r in some if r["status"] == records.OK]
        if not measured:
            row |= report.failure(some[-1])
            continue
        own, base = seconds[workload, system], seconds.get((workload, "hytrain"))
        row |= {"ms_a_step": short(1e3 * own)}
        row["fastest_ms"] = short(1e3 * min(one["fastest"] for one in measured))
        row |= {
            "over_hytrain": short(ratio(own, base), 3),
            "gpu_gib": short(measured[-1]["gpu_gib"]),
        }
        row["on_the_gpu"] = measured[-1]["gpu_layers"]
    return table


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows)))
