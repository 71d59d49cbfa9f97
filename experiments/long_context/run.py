"""The longest sequence of an 8 B Llama on one GPU, or on GPUs that share it, beside DeepSpeed.

    python experiments/long_context/run.py --gpu-gib 78 --out DIR
    python experiments/long_context/run.py --part shared --gpus 2 --gpu-gib 78 --out DIR
    python experiments/long_context/run.py --part exact --gpus 2 --model llama-0.4b --out DIR
    python experiments/long_context/run.py --device cpu --model toy --host-gib 9 --out DIR

All systems have DeepSpeed's TiledMLP and TiledFusedLogitsLoss, and recompute blocks, whose inputs
are in the host memory that is left by calculation. The longest sequence is tried in two steps whose
attention sees windows of 4,096 tokens, which takes as much memory as the whole one; timed steps
have the whole one. Part exact: fp32 training, every master weight after three steps on one GPU and
on several.
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
from experiments.common.report import Claim, ratio, short, worst

TIMES_AS_LONG, OF_LIMIT, DIFFERENCE = 1.25, 1.05, 1e-5
SYSTEMS: dict[str, Json] = {
    "hytrain fp32": {"system": "hytrain", "gpu_fraction": 0.0},
    "forward and backward": {"system": "forward_backward", "drops": True},
    "DeepSpeed ZeRO-3 offload": {"system": "deepspeed_zero3_offload"},
    "hytrain 8bit": {"system": "hytrain", "gpu_fraction": 0.0, "section": {"moments": "8bit"}},
}
PARTS = ("one", "shared", "exact")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, model="llama-8b", batch=1, seq=32768)
    add = parser.add_argument
    add("--part", default="one", choices=PARTS)
    add("--gpus", default=2, type=int, help="that share a sequence (shared, exact)")
    add("--stage", default=3, type=int, help="of ZeRO, hytrain's")
    add("--gpu-gib", type=float, help="limit of a GPU")
    add("--host-gib", default=126.0, type=float, help="of a rank's host memory (%(default)s)")
    add("--layers", type=int, help="blocks of the model, in place of its own")
    add("--length", type=int, help="confirm this length instead of the predicted")
    add("--times", default=(65536,), type=runner.counts, help="lengths timed with all attention")
    add("--timed-steps", default=3, type=int, help="of each such length")
    add("--job-seconds", default=110.0, type=float, help="that one job takes, about")
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each system; in part exact one on a single GPU and one on several."""
    is_toy = options.device == "cpu"
    degree = 1 if options.part == "one" else options.gpus
    # With fewer tokens a rank, the memory that grows with them is less than other fluctuations.
    times = 1 if degree == 1 else 2 * degree
    common: Json = {
        **{"worker": "experiments.long_context.worker", "clip": 1.0, "stage": options.stage},
        **{"seconds": options.job_seconds, "host_gib": options.host_gib, "host_floor_gib": 1.0},
        **{"lengths": (64, 128) if is_toy else (times * 16384, times * 49152)},
        **{"times": (96,) if is_toy else options.times, "timed_steps": options.timed_steps},
        **runner.workload(options),
    }
    if options.gpu_gib is not None:
        common["cap_gib"] = options.gpu_gib
    if options.layers is not None:
        common["layers"] = options.layers
    if options.length is not None:
        common["length"] = options.length
    if options.part == "exact":
        file = str((options.out / "weights.pt").resolve())
        exact = {**common, **SYSTEMS["hytrain fp32"], "fp32": True, "steps": 3}
        return [
            {**exact, "label": "one GPU", "degree": 1, "keep": file},
            {**exact, "label": f"{degree} GPUs", "degree": degree, "ranks": degree, "beside": file},
        ]
    return [
        {**common, **system, "label": label, "degree": degree, "ranks": degree}
        for label, system in SYSTEMS.items()
    ]


def rows(result: Json) -> list[Json]:
    """A row for each job."""
    return [_row(record) for record in result["jobs"]]


def _row(record: Json) -> Json:
    row: Json = {"system": record["label"], "status": record["status"]}
    if record["status"] != records.OK:
        row |= report.failure(record)
    for rank in record["ranks"][:1]:
        measured = rank.get("measured", [])
        whole = {one["length"]: min(one["seconds"]) for one in measured if one["window"] == 0}
        row["step_s"] = {str(length): short(seconds) for length, seconds in whole.items()}
        row["tokens_s"] = {str(n): round(n / seconds) for n, seconds in whole.items()}
        if "longest" in rank:
            longest = rank["longest"]
            row |= {"longest": longest["length"], "blocks_on_host": longest["blocks_on_host"]}
            row |= {"gpu_gib": short(longest.get("gpu_peak_allocated_gib"))}
            row |= {"host_gib": short(max(one["host_gib"] for one in measured))}
        if "compared" in rank:
            row |= {"moved_by": short(rank["moved_by"]), **rank["compared"]}
    return row


def claims(rows: Sequence[Json]) -> list[Claim]:
    """The claims about length, the limit and exactness, as far as this part measures them."""
    of = {row["system"]: row for row in rows}
    own, limit = of.get("hytrain fp32", {}), of.get("forward and backward", {})
    other = of.get("DeepSpeed ZeRO-3 offload", {})
    found: list[Claim] = []
    if own:
        as_long = ratio(own.get("longest"), other.get("longest"))
        found.append(Claim("as long as DeepSpeed's", as_long, TIMES_AS_LONG, at_least=True))
        times = [ratio(own["step_s"].get(n), t) for n, t in limit.get("step_s", {}).items()]
        found.append(Claim("of forward and backward alone", worst(times), OF_LIMIT))
    differences = [row["largest_difference"] for row in rows if "largest_difference" in row]
    if differences:
        found.append(Claim("largest difference of a weight", worst(differences), DIFFERENCE))
    return found


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows, claims)))
