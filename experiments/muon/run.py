"""Muon: hytrain beside DeepSpeed with CPU offload, and beside all state on the GPU.

    python experiments/muon/run.py --out DIR
    python experiments/muon/run.py --tokens accumulated --out DIR
    python experiments/muon/run.py --part third_place --out DIR
    python experiments/muon/run.py --toy --out DIR

Part third_place: AdamW at 9.84 B, every step clipped: on the CPU beside the GPU, and on the GPU,
with state streamed to it. Each system has processes of its own, in turns; Muon is measured without
clipping, which DeepSpeed defines differently.
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

K0, MOST, ALL_GPU, DEEPSPEED = (
    "hytrain k=0",
    "hytrain solved",
    "all on the GPU",
    "DeepSpeed offload",
)
SYSTEMS: dict[str, Json] = {
    ALL_GPU: {"system": "all_gpu_muon", "seconds": 45.0},
    K0: {"system": "hytrain", "gpu_fraction": 0.0, "seconds": 60.0},
    MOST: {
        "system": "hytrain",
        "gpu_fraction": "solve",
        "settle": {"least": 20, "quiet": 8, "most": 60},
        "seconds": 90.0,
    },
    DEEPSPEED: {"system": "deepspeed_zero2_offload", "threads": [16], "seconds": 150.0},
}
_SOLVED: Json = {
    "gpu_fraction": "solve",
    "settle": {"least": 12, "quiet": 3, "most": 40},
    "seconds": 110.0,
}
ON_CPU, STREAMED = "AdamW on the CPU", "AdamW streamed"
THIRD_PLACE: dict[str, Json] = {
    "forward and backward": {"system": "forward_backward", "drops": True, "seconds": 30.0},
    ON_CPU: {"system": "hytrain", **_SOLVED},
    STREAMED: {"system": "hytrain_streamed_adamw", **_SOLVED},
}
MUON: Json = {"lr": 2e-3, "adam_lr": 1e-4, "momentum": 0.95, "weight_decay": 0.01}
CLIP = 0.01
"""Clipping norm that every step's gradient exceeds."""
TOKENS = 65536
"""Tokens of a step with accumulation."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, budget=590.0)
    add = parser.add_argument
    add("--part", default="muon", choices=["muon", "third_place"])
    add("--tokens", default="once", choices=["once", "accumulated"],
        help=f"a micro-batch a step, or as many as have {TOKENS} tokens")  # fmt: skip
    add("--turns", default=2, type=int, help="of all systems, each in a new process")
    add("--moments", default="fp32", choices=["fp32", "bf16"])
    add("--warmup", default=3, type=int)
    add("--windows", default=3, type=int)
    add("--steps", default=3, type=int, help="in a window")
    add("--toy", action="store_true", help="a toy model on a CPU")
    options = parser.parse_args(arguments)
    if options.part == "third_place":
        options.model, options.turns = "llama-10b", 1
    if options.toy:
        options.device, options.model, options.batch, options.seq = "cpu", "toy", 2, 16
    return options


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each system and turn."""
    tokens = 4 * options.batch * options.seq if options.toy else TOKENS
    many = max(1, tokens // (options.batch * options.seq))
    is_muon = options.part == "muon"
    optimizer = {"optimizer": {"type": "Muon", "params": MUON}} if is_muon else {}
    return [
        {
            "label": f"{label}, turn {turn}",
            "of": label,
            "worker": "experiments.common.bench",
            "clip": None if is_muon else CLIP,
            **optimizer,
            "accumulation": many if options.tokens == "accumulated" else 1,
            "section": {"moments": options.moments},
            **{"windows": options.windows, "steps": options.steps, "warmup": options.warmup},
            **runner.workload(options),
            **settings,
        }
        for turn in range(1, options.turns + 1)
        for label, settings in (SYSTEMS if is_muon else THIRD_PLACE).items()
    ]


def rows(result: Json) -> list[Json]:
    """A row for each system: medians over turns, and their ratio to the first system's."""
    labels = list(dict.fromkeys(record["job"]["of"] for record in result["jobs"]))
    found: dict[str, list[Json]] = {label: [] for label in labels}
    states: dict[str, list[str]] = {label: [] for label in labels}
    for record in result["jobs"]:
        states[record["job"]["of"]].append(record["status"])
        if record["status"] == records.OK:
            found[record["job"]["of"]].append(record["ranks"][0])
    seconds = {
        label: statistics.median(rank["step_seconds"] for rank in some)
        for label, some in found.items()
        if some
    }
    table: list[Json] = []
    for label, some in found.items():
        row: Json = {"system": label, "status": " ".join(sorted(set(states[label]))) or "-"}
        if some:
            row |= {
                "step_seconds": short(seconds[label]),
                "of_first": short(ratio(seconds[label], seconds.get(labels[0])), 3),
                "gpu_gib": report.gib(
                    max(rank["gpu"].get("peak_allocated_bytes", 0) for rank in some)
                ),
                "host_gib": report.gib(max(rank.get("host_bytes", 0) for rank in some)),
                "gpu_layers": some[-1].get("gpu_layers"),
                "clipped": some[-1].get("clipped"),
            }
        table.append(row)
    return table


def claims(table: Sequence[Json]) -> list[Claim]:
    """The claims about Muon; for AdamW, which place of the update is faster."""
    step = {row["system"]: row.get("step_seconds") for row in table}
    if ON_CPU in step or STREAMED in step:
        times = ratio(step.get(STREAMED), step.get(ON_CPU))
        return [Claim("AdamW streamed: its time over that of the CPU's update", times)]
    return [
        Claim("hytrain k=0: times as fast as DeepSpeed's offload",
              ratio(step.get(DEEPSPEED), step.get(K0)), 2.0, at_least=True),
        Claim("hytrain, most that fits: step of all on the GPU",
              ratio(step.get(MOST), step.get(ALL_GPU)), 1.05),
    ]  # fmt: skip


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows, claims)))
