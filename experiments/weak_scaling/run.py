"""Measure weak scaling: the same batch a GPU on 1, 2 and 4 equal GPUs, beside other systems.

    python experiments/weak_scaling/run.py --gpus 4 --sizes 4,1,2 --out DIR
    python experiments/weak_scaling/run.py --gpus 4 --sizes 2,4 --out DIR --model llama-8b \
        --batch 2 --seq 4096 --checkpointing --systems forward_backward hytrain fsdp2
    python experiments/weak_scaling/run.py --gpus 2 --sizes 2 --account --gpu-fraction 1 --out DIR
    python experiments/weak_scaling/run.py --gpus 2 --sizes 2,1 --out DIR --device cpu --model toy

Each system and number of GPUs is a job of its own, one after another, since they share the host. A
GPU has the same cores in all of them. hytrain comes first at every size, so that a run which is cut
short has the claim. Forward and backward alone: each rank by itself, no collective, no update.
--account says where the time goes that hytrain's steps take more than that (account.py).
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
from experiments.common.report import Claim, ratio, short

SYSTEMS: dict[str, Json] = {
    "hytrain": {"system": "hytrain", "seconds": 55.0},
    "hytrain_zero3": {"system": "hytrain", "stage": 3, "built": "partitioned", "seconds": 55.0},
    "forward_backward": {"system": "forward_backward", "drops": True, "seconds": 25.0},
    "fsdp2": {"system": "fsdp2", "offload": False, "seconds": 40.0},
    "zero2_gpu": {"system": "deepspeed_zero2", "seconds": 50.0},
    "zero2": {"system": "deepspeed_zero2_offload", "seconds": 85.0},
    "zero3": {"system": "deepspeed_zero3_offload", "built": "partitioned", "seconds": 100.0},
}
"""Fields of a job, with about how many seconds it takes with the 3 B model. fsdp2 and zero2_gpu
have all state on the GPUs."""
DEFAULT = ("hytrain", "zero2", "zero3")
EFFICIENCY = 0.92
ACCOUNT = "experiments.weak_scaling.account"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__)
    add = parser.add_argument
    add("--gpus", required=True, type=int, help="of the machine; its cores are divided by them")
    add("--sizes", default=(4, 1, 2), type=runner.counts, metavar="N,...", help="GPUs of each job")
    add("--systems", nargs="+", default=list(DEFAULT), choices=SYSTEMS)
    add("--accumulation", default=1, type=int, help="micro-batches a step")
    add("--layers", type=int, help="blocks, in place of the model's own")
    add("--moments", default="fp32", choices=("fp32", "bf16", "8bit"), help="hytrain's")
    add(
        "--slowness",
        default=1.0,
        type=float,
        help="of jobs, beside those of 3 B: how long they may take",
    )
    add("--checkpointing", action="store_true", help="blocks are computed again in backward")
    add("--gpu-fraction", default="solve", type=runner.fraction, help="hytrain's k")
    add("--settle", default=24, type=int, help="hytrain's steps before the timed ones: k is solved")
    add("--warmup", default=3, type=int, help="the other systems' steps before the timed ones")
    add("--steps", default=4, type=int, help="steps of each of the two timed windows")
    add("--account", action="store_true", help="where steps of several GPUs go, and nothing else")
    options = parser.parse_args(arguments)
    if max(options.sizes) > options.gpus:
        parser.error(f"--sizes has {max(options.sizes)}, --gpus is {options.gpus}")
    return options


def is_ours(name: str) -> bool:
    """Whether the system is hytrain."""
    return name.startswith("hytrain")


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for hytrain at every size, then for the others."""
    systems = ["hytrain"] if options.account else options.systems
    ordered = sorted(systems, key=lambda name: not is_ours(name))
    return [
        {
            **{"label": f"{name} on {size}", "ranks": size},
            **{"worker": ACCOUNT if options.account else "experiments.common.bench"},
            **{"clip": 1.0, "gpu_fraction": options.gpu_fraction},
            **{"accumulation": options.accumulation, "windows": 2, "steps": options.steps},
            # Ranks step together, so that the number of steps until k has settled must be given.
            "warmup": options.settle
            if is_ours(name) and options.gpu_fraction == "solve"
            else options.warmup,
            "checkpointing": options.checkpointing,
            "section": {"moments": options.moments},
            **runner.workload(options),
            **({"layers": options.layers} if options.layers else {}),
            **SYSTEMS[name],
            "seconds": options.slowness * SYSTEMS[name]["seconds"],
        }
        for name, size in [(n, s) for s in options.sizes for n in ordered if is_ours(n)]
        + [(n, s) for s in options.sizes for n in ordered if not is_ours(n)]
    ]


def rows(result: Json) -> list[Json]:
    """A row for each system and number of GPUs; weak scaling is relative to its single GPU."""
    found: list[Json] = []
    for record in result["jobs"]:
        row: Json = {"system": record["label"].split(" on ")[0], "gpus": record["job"]["ranks"]}
        if record["status"] == records.OK and record["job"]["worker"] == ACCOUNT:
            row |= _account_row(record["ranks"])
        elif record["status"] == records.OK:
            timed, ranks = report.timed_row(record), record["ranks"]
            row |= {"step_s": timed["step_s"], "window_s": timed["window_s"]}
            samples = sum(rank["samples"] for rank in ranks)
            row["samples_per_s"] = short(samples / report.slowest(ranks)[0])
            row |= {"tflops_a_gpu": timed["tflops"], "k": short(ranks[0].get("gpu_fraction"), 3)}
            row["peak_gpu_gib"] = timed["peak_gpu_gib"]
        else:
            row |= report.failure(record)
        found.append(row)
    alone = {row["system"]: row.get("samples_per_s") for row in found if row["gpus"] == 1}
    limit = {row["gpus"]: row.get("step_s") for row in found if row["system"] == "forward_backward"}
    for row in found:
        of_limit = ratio(row.get("step_s"), limit.get(row["gpus"]))
        if of_limit is not None:
            row["over_forward_backward"] = short(of_limit, 3)
        scaled = ratio(row.get("samples_per_s"), alone.get(row["system"]))
        if scaled is not None:
            row["weak_scaling"] = short(scaled / row["gpus"])
    return sorted(found, key=lambda row: (row["system"], row["gpus"]))


def _account_row(ranks: Sequence[Json]) -> Json:
    """The account of the rank whose windows are longest over forward and backward alone."""
    rank = max(ranks, key=lambda one: one["over"])
    found = rank.get("account", {})
    causes = {f"{cause}_ms": took for cause, took in found.get("causes", {}).items()}
    more = {f"{name}_ms": short(took) for name, took in found.items() if name != "causes"}
    return {"over_forward_backward": short(rank["over"], 3), **more, **causes}


def claims(rows: Sequence[Json]) -> list[Claim]:
    """Weak scaling of hytrain; the others' times are reported beside it."""
    found: list[Claim] = []
    for row in rows:
        of_run = [each for each in rows if each.get("run") == row.get("run")]
        where = f"{row.get('run', '')}: {row['system']} on {row['gpus']} GPUs"
        if is_ours(row["system"]) and row["gpus"] > 1 and "step_s" in row:
            text = f"{where}: weak scaling"
            found.append(Claim(text, row.get("weak_scaling"), EFFICIENCY, at_least=True))
        elif not is_ours(row["system"]):
            ours = [r for r in of_run if (r["system"], r["gpus"]) == ("hytrain", row["gpus"])]
            times = ratio(row.get("step_s"), ours[0].get("step_s")) if ours else None
            found.append(Claim(f"{where}: its time over hytrain's", times, at_least=True))
    return found


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    text = report.of_result(rows, claims)
    raise SystemExit(runner.main(asked, jobs(asked), text, shares=asked.gpus))
