"""The largest models: weights sharded over several GPUs (ZeRO-3), moments of fewer bytes.

    python experiments/moment_kinds/sharded.py --gpus 2 --models 8bit=50 --out DIR
    python experiments/moment_kinds/sharded.py --gpus 2 --models 8bit=50 --clip 0 --out DIR
    python experiments/moment_kinds/sharded.py --out DIR --device cpu --model toy --models 8bit=3

Each of --models KIND=BLOCKS is trained in turn by all GPUs, activations recomputed, k solved. It is
built under deepspeed.zero.Init: no GPU holds it whole.
DIR/sharded.json is rewritten after each, DIR has the ranks' logs; the table comes last.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.group import Place, Work, describe_beside, divide_cores, run_all
from experiments.common.records import GIB, Entry, Job, Json, Measurement, Workload
from experiments.common.sizes import MODELS
from experiments.moment_kinds.run import KINDS


def _model(text: str) -> tuple[str, int]:
    kind, _, blocks = text.partition("=")
    if kind not in KINDS or not blocks.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: KIND=BLOCKS, KIND of {', '.join(KINDS)}")
    return kind, int(blocks)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", default=2, type=int)
    add("--models", nargs="+", type=_model, default=[("8bit", 50)], metavar="KIND=BLOCKS")
    add("--out", required=True, type=Path, help="folder for sharded.json and logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", default="llama-41b", choices=MODELS, help="whose blocks they have")
    add("--batch", default=8, type=int, help="sequences a GPU")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add(
        "--clip",
        default=1.0,
        type=float,
        help="gradient clipping norm; 0: none, and no overflow check, so that updates are final at "
        "once and no gradient waits on the host: 2 bytes a parameter less",
    )
    add("--settle-steps", default=8, type=int, help="before anything is timed: k is solved")
    add("--timed-steps", default=2, type=int, help="of each of two windows")
    add("--host-floor-gib", default=4.0, type=float, help="all ends below this, available")
    add("--budget-seconds", default=550.0, type=float, help="for everything")
    return parser.parse_args(arguments)


def stages_of(options: argparse.Namespace) -> list[Json]:
    """What all ranks train, one model after another."""
    workload = Workload(
        model=options.model, batch=options.batch, seq=options.seq, device=options.device
    )
    found: list[Json] = []
    for kind, blocks in options.models:
        settings: Json = {
            "gpu_fraction": "solve",
            "stage": 3,
            "partitioned": True,
            "direct": options.clip == 0.0,
            "kinds": [kind],
            "layers": blocks,
            "checkpointing": "on",
            "settle_steps": options.settle_steps,
            "timed_steps": options.timed_steps,
            "host_floor_gib": options.host_floor_gib,
            "limit_seconds": options.budget_seconds,
        }
        name = f"{kind} {blocks}"
        entry = Entry(label=name, system="hytrain", clip=options.clip or None, options=settings)
        job = Job(
            entry=entry, workload=workload, measurement=Measurement(windows=2, steps=2, warmup=0)
        )
        found.append({"name": name, "kind": kind, "job": job.to_json()})
    return found


def line(name: str, ranks: Sequence[Json], tokens: int) -> str:
    """A row of the table; the slowest rank's step is the job's.

    Args:
        name: of the model.
        ranks: each one's result.
        tokens: of a rank's step.
    """
    seconds = max(rank["step_seconds"] for rank in ranks)
    first = ranks[0]
    gpu = max(rank["gpu"].get("peak_allocated_bytes") or 0 for rank in ranks) / GIB
    host = sum(rank["host_rss_bytes"] for rank in ranks) / GIB
    cells = [
        name,
        f"{first['num_parameters'] / 1e9:.2f} B",
        ", ".join(f"{rank['gpu_layers']}/{rank['num_layers']}" for rank in ranks),
        f"{seconds:.3f}",
        f"{len(ranks) * tokens / seconds:.0f}",
        f"{first['tflops'] * first['step_seconds'] / seconds:.0f}",
        f"{gpu:.1f}",
        f"{host:.1f}",
        f"{first['first_loss']:.2f} to {first['loss']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def table(results: Json, tokens: int) -> list[str]:
    """A line a model."""
    lines = [
        "| moments, blocks | size | layers on the GPU, by rank | step s | tokens/s | TFLOP/s a GPU "
        "(recomputation not counted) | GPU GiB | host GiB, all ranks | loss |",
        "|" + " --- |" * 9,
    ]
    for name, found in results.items():
        if found["status"] == records.OK:
            lines.append(line(name, found["ranks"], tokens))
            continue
        errors = [rank["error"] for rank in found["ranks"] if rank and "error" in rank]
        words = " ".join(errors or found.get("log", [])[-1:])
        lines.append(f"{name}: {found['status']}: {words[:400]}")
    return lines


def measure(options: argparse.Namespace) -> Json:
    """All models; the file is written after each."""
    begin = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    cores = divide_cores(sorted(os.sched_getaffinity(0)), options.gpus)
    where = Place(device=options.device, gpus=tuple(range(options.gpus)), cores=cores)
    work = Work("sharded", stages_of(options), options.gpus)
    record: Json = {
        "command": " ".join(["python experiments/moment_kinds/sharded.py", *sys.argv[1:]]),
        "results": work.results,
    }
    hardware = describe_beside(record, options.device, options.gpus)

    def save() -> None:
        record["seconds"] = time.monotonic() - begin
        records.write_json(options.out / "sharded.json", record)
        print(f"{record['seconds']:.0f} s: {list(work.results)}", flush=True)

    run_all(
        [work],
        "experiments.moment_kinds.sharded_worker",
        lambda _: [where],
        options.out,
        begin + options.budget_seconds,
        save,
    )
    hardware.join()
    save()
    return record


def main(arguments: Sequence[str]) -> int:
    """Returns 0 also where a model does not train: that is a result, and the table says so."""
    options = parse(arguments)
    record = measure(options)
    print("\n".join(table(record["results"], options.batch * options.seq)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
