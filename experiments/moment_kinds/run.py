"""Moments in fp32, bf16 and 8 bits: speed of steps, and the largest model that trains.

    python experiments/moment_kinds/run.py --part k0 --out DIR
    python experiments/moment_kinds/run.py --part largest --sizes bf16=44,42 8bit=55,53 --out DIR
    python experiments/moment_kinds/run.py --part sharded --gpus 2 --sizes 8bit=50 --out DIR
    python experiments/moment_kinds/run.py --part k0 --out DIR --device cpu --model toy --seq 32

Parts:
  k0           2.9 B, all layers on the host, the kinds in turns
  ten_b        9.84 B, k solved, one kind after another
  largest      of each --sizes KIND=BLOCKS,... the first that trains, activations recomputed
  sharded      the same on --gpus GPUs, ZeRO-3: no GPU holds the model whole
  workstation  7 B (or --sizes of --model), weights streamed, within --gpu-gib of the GPU and
               --host-gib of the host, both enforced
  beside       2.9 B in the same memory, and DeepSpeed's ZeRO-3 with weights and state on the host

Parts k0, ten_b and largest also measure forward and backward only of the same model, without
keeping gradients. With --clip 0 nothing is clipped, and updates are final at once: no gradient
waits on the host, 2 bytes a parameter less.
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

KINDS = ("fp32", "bf16", "8bit")
PARTS: dict[str, Json] = {
    "k0": {"model": "llama-3b", "gpu_fraction": 0.0, "least": 3},
    "ten_b": {"model": "llama-10b", "least": 12},
    "largest": {"model": "llama-15b", "least": 8, "checkpointing": True},
    "sharded": {
        **{"model": "llama-41b", "least": 8, "checkpointing": True, "host_floor_gib": 4.0},
        **{"stage": 3, "built": "partitioned"},
    },
    # The kernel enforces this part's host limit; the machine itself has more memory.
    "workstation": {"model": "llama-7b", "least": 8, "checkpointing": True, "host_floor_gib": 0.25},
    "beside": {"model": "llama-3b", "least": 8, "checkpointing": True, "host_floor_gib": 0.25},
}
CAPPED = ("workstation", "beside")
TIMES = {"bf16": 1.2, "8bit": 1.4}
"""Claimed speed relative to fp32 moments, with all layers on the host."""


def _sizes(text: str) -> tuple[str, tuple[int, ...]]:
    kind, _, blocks = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r}: the kind is one of {', '.join(KINDS)}")
    return kind, runner.counts(blocks)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, model=None)
    add = parser.add_argument
    add("--part", required=True, choices=PARTS)
    add("--clip", default=1.0, type=float, help="gradient clipping norm; 0: none")
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="which, in this order")
    add("--sizes", nargs="+", type=_sizes, metavar="KIND=N,N,...",
        help="blocks, until one trains (largest, sharded: bf16=44,42 8bit=55,53)")  # fmt: skip
    add("--master", default="fp32", choices=("fp32", "split"), help="form of the master weights")
    add("--gpus", default=2, type=int, help="of part sharded")
    add("--gpu-gib", type=float, help="limit of a GPU; a workstation's is 24 unless given")
    add("--host-gib", type=float, help="enforced limit; a workstation's is 64 unless given")
    add("--gpu-fraction", type=runner.fraction, help="default: the part's")
    add("--settle-steps", type=int, help="at least, before anything is timed; default: the part's")
    add("--timed-steps", default=4, type=int, help="of each of two windows")
    add("--job-seconds", default=75.0, type=float, help="that one size takes, about")
    add("--rounds", default=2, type=int, help="of part k0")
    options = parser.parse_args(arguments)
    if options.sizes is None and options.part in ("largest", "sharded"):
        options.sizes = [("bf16", (44, 42)), ("8bit", (55, 53))]
    return options


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each kind (and size), and for forward and backward only."""
    settings = dict(PARTS[options.part])
    least = options.settle_steps or settings.pop("least")
    settings.pop("least", None)
    fraction = options.gpu_fraction
    fraction = settings.pop("gpu_fraction", "solve") if fraction is None else fraction
    common: Json = {
        **{"worker": "experiments.common.bench", "windows": 2, "steps": options.timed_steps},
        **{"warmup": least, "gpu_fraction": fraction, "seconds": options.job_seconds},
        **{"clip": options.clip or None, "direct": options.clip == 0.0},
        **runner.workload(options),
        **settings,
        "model": options.model or settings["model"],
    }
    if options.part in CAPPED:
        limits = {"cap_gib": options.gpu_gib or 24.0, "host_limit_gib": options.host_gib or 64.0}
        common |= limits
        common |= {"streamed": True, "built": "host", "batch": min(4, options.batch)}
    else:
        limits = {"cap_gib": options.gpu_gib, "host_limit_gib": options.host_gib}
        common |= {name: gib for name, gib in limits.items() if gib}
    if options.part == "sharded":
        common["ranks"] = options.gpus

    def job(kind: str, label: str, **more: object) -> Json:
        one: Json = {**common, "label": label, "kind": kind, "system": "hytrain"}
        one |= {"section": {"moments": kind, "master": options.master}, **more}
        if fraction == "solve" and "ranks" not in one:
            # Layers move a few at a time: a solved k is reached some steps after it is known.
            one["settle"] = {"least": least, "quiet": 3, "most": 4 * least}
        return one

    def bare(label: str, **more: object) -> Json:
        return {**common, "label": label, "kind": "forward and backward only", "warmup": 2,
                "system": "forward_backward", "drops": True, **more}  # fmt: skip

    if options.sizes:
        found = [
            job(kind, f"{kind} {n}", layers=n, group=kind, group_ends="ok")
            for kind, sizes in options.sizes
            for n in sizes
        ]
        if options.part in ("sharded", *CAPPED):
            return found
        blocks = sorted({n for _, sizes in options.sizes for n in sizes})
        return [*found, *(bare(f"forward and backward {n}", layers=n) for n in blocks)]
    rounds = options.rounds if options.part == "k0" else 1
    found = [
        job(kind, f"{options.part} {kind}" + (f" turn {turn}" if rounds > 1 else ""), turn=turn)
        for turn in range(1, rounds + 1)
        for kind in options.kinds
    ]
    if options.part == "beside":
        zero3 = {"system": "deepspeed_zero3_streamed", "warmup": 1}
        return [*found, job("ZeRO-3 offload", "beside zero3") | zero3]
    return found if options.part in CAPPED else [bare("forward and backward"), *found]


def rows(result: Json) -> list[Json]:
    """A row for each job; speeds relative to forward and backward only of as many blocks."""
    alone = {
        record["job"].get("layers"): record["ranks"][0]["step_seconds"]
        for record in result["jobs"]
        if record["job"]["system"] == "forward_backward" and record["status"] == records.OK
    }
    found: list[Json] = []
    for record in result["jobs"]:
        job = record["job"]
        row: Json = {"process": record["label"], "moments": job["kind"], "turn": job.get("turn")}
        found.append(row)
        ranks = record["ranks"]
        if ranks and "num_parameters" in ranks[0]:
            row["parameters_b"] = short(ranks[0]["num_parameters"] / 1e9)
        row |= report.timed_row(record)
        if record["status"] != records.OK:
            continue
        row["of_forward_backward"] = short(ratio(alone.get(job.get("layers")), row["step_s"]))
        tokens = sum(rank["samples"] for rank in ranks) * job["seq"]
        row["tokens_per_s"] = short(tokens / report.slowest(ranks)[0])
        if "gpu_layers" in ranks[0]:
            row["gpu_layers"] = [rank["gpu_layers"] for rank in ranks]
            row["of"], row["clipped"] = ranks[0]["of"], short(ranks[0]["clipped"])
            row["is_settled"] = ranks[0].get("settling", {}).get("is_settled")
    return found


def claims(rows: Sequence[Json]) -> list[Claim]:
    """The claims; those of part k0 within turns, since fewer steps are clipped in later ones."""
    found: list[Claim] = []
    k0 = [row for row in rows if row["process"].startswith("k0") and "step_s" in row]
    for kind, times in TIMES.items():
        pairs = [
            base["step_s"] / own["step_s"]
            for base in k0
            for own in k0
            if (base["moments"], own["moments"]) == ("fp32", kind) and base["turn"] == own["turn"]
        ]
        if pairs:
            text = f"k0: {kind} moments, times as fast as fp32"
            found.append(Claim(text, statistics.median(pairs), times, at_least=True))
    shares = [row.get("of_forward_backward") for row in rows if row["moments"] in TIMES]
    best = max((share for share in shares if share is not None), default=None)
    return [*found, Claim("best share of the speed of forward and backward only", best)]


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows, claims)))
