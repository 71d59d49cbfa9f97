"""Moments in fp32, bf16 and 8 bits: speed of steps, and the largest model that trains.

    python experiments/moment_kinds/run.py --part k0 --out DIR
    python experiments/moment_kinds/run.py --part largest --sizes bf16=44,42 8bit=55,53 --out DIR
    python experiments/moment_kinds/run.py --part k0 --out DIR --device cpu --model toy --seq 32

Parts:
  k0           all layers on the host; an engine a kind, steps in turns (2.9 B)
  ten_b        k solved, one kind after another, beside forward and backward only (9.84 B)
  largest      of each --sizes KIND=BLOCKS,... the first that trains, activations recomputed
  workstation  7 B, weights streamed, 24 GiB of the GPU, 64 GiB of the host, both enforced
  beside       2.9 B in the same memory, and DeepSpeed's ZeRO-3 with weights and state on the host

DIR/PART.json is rewritten after every process, what a process has measured so far is in its
folder; the table comes last.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.options import counts
from experiments.common.processes import run_worker
from experiments.common.records import GIB, Entry, Job, Json, Measurement, Workload
from experiments.common.sizes import MODELS
from experiments.solve_k.launch import outcome

KINDS = ("fp32", "bf16", "8bit")
ZERO3 = "ZeRO-3 offload"
"""In the place of a kind: DeepSpeed's own, whose moments are fp32."""

PARTS: dict[str, Json] = {
    "k0": {"model": "llama-3b", "plan": "turns", "gpu_fraction": 0.0, "settle_steps": 3},
    "ten_b": {"model": "llama-10b", "plan": "sequence", "settle_steps": 12},
    "largest": {"model": "llama-15b", "plan": "sequence", "settle_steps": 8},
    "workstation": {
        "model": "llama-7b",
        "plan": "sequence",
        "settle_steps": 8,
        # There the kernel refuses what is too much; the machine itself has more.
        "host_floor_gib": 0.25,
    },
    "beside": {
        "model": "llama-3b",
        "plan": "sequence",
        "settle_steps": 8,
        "host_floor_gib": 0.25,
    },
}
CHECKPOINTED = ("largest", "workstation", "beside")
CAPPED = ("workstation", "beside")


def _sizes(text: str) -> tuple[str, tuple[int, ...]]:
    kind, _, blocks = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{text!r}: the kind is one of {', '.join(KINDS)}")
    return kind, counts(blocks)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--part", required=True, choices=PARTS)
    add("--out", required=True, type=Path, help="folder for PART.json and logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", choices=MODELS, help="default: the part's")
    add("--batch", type=int, help="sequences a step; default 8, within limits 4")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add("--kinds", default=",".join(KINDS), help="which, in this order; within limits: 8bit")
    add(
        "--sizes",
        nargs="+",
        type=_sizes,
        default=[("bf16", (44, 42)), ("8bit", (55, 53))],
        metavar="KIND=N,N,...",
        help="blocks in part largest, until one trains",
    )
    add("--gpu-gib", default=24.0, type=float, help="limit of a workstation")
    add("--host-gib", default=64.0, type=float, help="limit of a workstation")
    add("--gpu-fraction", help="a number or solve; default: the part's")
    add("--settle-steps", type=int, help="at least, before anything is timed; default: the part's")
    add("--timed-steps", default=4, type=int)
    add("--host-floor-gib", default=2.0, type=float, help="a process ends below this, available")
    add("--budget-seconds", default=240.0, type=float, help="for the whole part")
    return parser.parse_args(arguments)


def jobs_of(options: argparse.Namespace) -> list[list[Job]]:
    """The processes: of each list, those after the first that trains are left out."""
    part = options.part
    settings = PARTS[part]
    common: Json = {
        "gpu_fraction": "solve",
        "layers": None,
        "kinds": options.kinds.split(","),
        "timed_steps": options.timed_steps,
        "host_floor_gib": options.host_floor_gib,
        "checkpointing": "on" if part in CHECKPOINTED else "off",
        "drop_gradients": True,
        **{key: value for key, value in settings.items() if key != "model"},
    }
    if options.settle_steps is not None:
        common["settle_steps"] = options.settle_steps
    if options.gpu_fraction is not None:
        chosen = options.gpu_fraction
        common["gpu_fraction"] = chosen if chosen == "solve" else float(chosen)
    workload = Workload(
        model=options.model or settings["model"],
        batch=options.batch or (4 if part in CAPPED else 8),
        seq=options.seq,
        device=options.device,
    )

    def job(label: str, **more: object) -> Job:
        entry = Entry(label=label, system="hytrain", clip=options.clip, options={**common, **more})
        return Job(
            entry=entry, workload=workload, measurement=Measurement(windows=1, steps=4, warmup=0)
        )

    if part == "largest":
        return [
            [job(f"{kind} {blocks}", kinds=[kind], layers=blocks) for blocks in sizes]
            for kind, sizes in options.sizes
        ]
    if part in CAPPED:
        limits = {"gpu_gib": options.gpu_gib, "host_gib": options.host_gib, "streamed": True}
        kinds = ["8bit"] if options.kinds == ",".join(KINDS) else common["kinds"]
        found = [[job(f"{part} {kind}", kinds=[kind], **limits)] for kind in kinds]
        if part == "beside":
            found.append([job("beside zero3", kinds=[ZERO3], **{**limits, "plan": "zero3"})])
        return found
    return [[job(part)]]


def kind_line(label: str, kind: str, result: Json) -> str:
    """A row of the table."""
    windows: list[Json] = result[f"kind {kind}"]
    seconds = [window["step_seconds"] for window in windows]
    median = statistics.median(seconds)
    last = windows[-1]
    reference = result.get("reference", {}).get("step_seconds")
    fp32 = [window["step_seconds"] for window in result.get("kind fp32", [])]
    # Turn by turn: in later ones fewer steps are clipped.
    over = [base / own for base, own in zip(fp32, seconds, strict=False)]
    peak = max(window["gpu"].get("peak_allocated_bytes", 0) for window in windows) / GIB
    cells = [
        label,
        f"{result['num_parameters'] / 1e9:.2f} B",
        # Where layers still moved, k is not what it would have come to.
        kind if last.get("is_settled", True) else f"{kind}, not settled",
        f"{last['gpu_layers']}/{last['num_layers']}" if "num_layers" in last else "-",
        f"{median:.3f} ({min(seconds):.3f})",
        "-" if reference is None else f"{reference / median:.1%}",
        f"{statistics.median(over):.2f}" if over else "-",
        f"{last['tflops']:.0f}",
        f"{peak:.1f}",
        f"{max(window['host_rss_bytes'] for window in windows) / GIB:.1f}",
        "-" if last.get("clipped_share") is None else f"{last['clipped_share']:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def table(measured: Sequence[Json]) -> list[str]:
    """A line a kind of each process."""
    lines = [
        "| process | size | moments | layers on the GPU | step s, median (least) | of the speed of "
        "forward+backward | over fp32 | TFLOP/s | GPU GiB | host GiB | clipped |",
        "|" + " --- |" * 11,
    ]
    for record in measured:
        result = record["result"] or {}
        label = record["label"]
        seen = [kind for kind in (*KINDS, ZERO3) if f"kind {kind}" in result]
        lines += [kind_line(label, kind, result) for kind in seen]
        if record["status"] != records.OK:
            words = result.get("error") or " ".join(record["log"][-1:])
            lines.append(f"{label}: {record['status']}: {words[:300]}")
    return lines


def run(options: argparse.Namespace) -> Json:
    """All processes of the part."""
    # Imported here, so that --help answers at once.
    from experiments.common.hardware import describe

    end = time.monotonic() + options.budget_seconds
    record: Json = {
        "command": " ".join(["python experiments/moment_kinds/run.py", *sys.argv[1:]]),
        "hardware": describe(options.device),
        "processes": [],
    }
    for alternatives in jobs_of(options):
        for job in alternatives:
            left = end - time.monotonic()
            if left < 10.0:
                print(f"{job.entry.label}: left out, no time", flush=True)
                break
            job.entry.options["limit_seconds"] = left
            folder = options.out / f"{options.part}_{job.entry.label.replace(' ', '_')}"
            folder.mkdir(parents=True, exist_ok=True)
            ended = run_worker("experiments.moment_kinds.worker", job, folder, left)
            status = outcome(ended.code, ended.result, ended.lines)
            record["processes"].append(
                {
                    "label": job.entry.label,
                    "job": dataclasses.asdict(job),
                    "status": status,
                    "wall_seconds": ended.wall_seconds,
                    "log": ended.lines,
                    "result": ended.result,
                }
            )
            records.write_json(options.out / f"{options.part}.json", record)
            print(f"{job.entry.label}: {status}, {ended.wall_seconds:.0f} s", flush=True)
            if status == records.OK:
                break
    return record


def main(arguments: Sequence[str]) -> int:
    """Returns 0 also where a process failed: that is a result, and the table says so."""
    options = parse(arguments)
    record = run(options)
    print("\n".join(table(record["processes"])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
