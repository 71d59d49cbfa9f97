"""ZeRO-3 beside ZeRO-2, with the weights on the GPUs or in host memory.

    python experiments/zero3/run.py --out DIR
    python experiments/zero3/run.py --ranks 2 --modes stage2,stage3,unequal --out DIR
    python experiments/zero3/run.py --out DIR --device cpu --model toy --batch 2 --seq 16

Each mode has processes of its own, one a GPU. DIR/result.json is rewritten after every mode; the
table comes last.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.hardware import describe
from experiments.common.processes import REPOSITORY, free_port
from experiments.common.records import GIB, Json, read_json, write_json
from experiments.common.sizes import SIZES

MODES: dict[str, Json] = {
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "unequal": {"stage": 3, "unequal": True},
    "streamed": {"stage": 3, "streamed": True},
    # Less GPU memory than the weights need: one short sequence, activations computed again.
    "capped": {"stage": 3, "streamed": True, "capped": True},
    "capped_stage2": {"stage": 2, "capped": True},
}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder for result.json and logs")
    add("--ranks", default=1, type=int, help="GPUs")
    add("--modes", default="stage2,stage3,streamed,capped,capped_stage2", help=", ".join(MODES))
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", default="llama-3b", choices=list(SIZES))
    add("--batch", default=8, type=int, help="sequences a GPU")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--gpu-fraction", default=0.0, type=float)
    add("--cap-share", default=0.9, type=float, help="GPU memory of the capped modes over weights")
    add("--warmup", default=3, type=int)
    add("--steps", default=3, type=int, help="of each of two timed windows")
    add("--budget-seconds", default=300.0, type=float, help="no mode begins later")
    return parser.parse_args(arguments)


def weight_bytes(model: str) -> int:
    """Of the training copy in bf16: embeddings, blocks, norms."""
    size = SIZES[model]
    block = 4 * size.hidden**2 + 3 * size.hidden * size.intermediate + 2 * size.hidden
    return 2 * (2 * size.vocab * size.hidden + size.layers * block + size.hidden)


def job_of(options: argparse.Namespace, mode: str) -> Json:
    """What a mode's ranks are given."""
    settings = MODES[mode]
    capped = settings.get("capped", False)
    ranks = options.ranks
    weights = [rank + 1.0 for rank in range(ranks)]
    unequal = [weight / sum(weights) for weight in weights]
    return {
        "stage": settings["stage"],
        "streamed": settings.get("streamed", False),
        "shard_fractions": unequal if settings.get("unequal") and ranks > 1 else None,
        "gpu_fraction": options.gpu_fraction,
        "device": options.device,
        "model": options.model,
        "batch": 1 if capped else options.batch,
        "seq": min(512, options.seq) if capped else options.seq,
        "checkpointing": capped,
        "cap_share": options.cap_share if capped else None,
        "weight_bytes": weight_bytes(options.model),
        "warmup": options.warmup,
        "steps": options.steps,
    }


def run_mode(options: argparse.Namespace, mode: str, limit: float) -> Json:
    """Starts the ranks and collects their results."""
    folder = options.out / mode
    folder.mkdir(parents=True, exist_ok=True)
    job = job_of(options, mode)
    write_json(folder / "job.json", job)
    common = {"WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if options.device == "cpu":
        common |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    results = [folder / f"rank{rank}.json" for rank in range(options.ranks)]
    processes: list[subprocess.Popen[bytes]] = []
    for rank, result in enumerate(results):
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", "experiments.zero3.worker"]
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [*command, str((folder / "job.json").resolve()), str(result.resolve())],
                    cwd=REPOSITORY,
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + limit
    try:
        for process in processes:
            process.wait(max(1.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"{mode}: ended after {limit:.0f} s", flush=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ended: Json = {"status": "killed"}
    return {"job": job, "ranks": [read_json(r) if r.exists() else ended for r in results]}


def table(modes: Json) -> list[str]:
    """A line a mode."""
    lines = [
        "| mode | status | step s (windows) | over stage 2 | peak GPU GiB | host GiB | "
        "largest loss difference to stage 2 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = modes.get("stage2", {}).get("ranks", [{}])[0]
    for name, mode in modes.items():
        first = mode["ranks"][0]
        if any(rank["status"] != "ok" for rank in mode["ranks"]):
            words = "; ".join(rank.get("error", rank["status"])[:90] for rank in mode["ranks"])
            status = ", ".join(sorted({rank["status"] for rank in mode["ranks"]}))
            lines.append(f"| {name} | {status}: {words} | | | | | |".replace("\n", " "))
            continue
        comparable = "losses" in base and mode["job"]["cap_share"] is None
        ratio, differs = "-", "-"
        if comparable:
            ratio = f"{first['step_seconds'] / base['step_seconds']:.3f}"
            pairs = zip(first["losses"], base["losses"], strict=True)
            differs = f"{max(abs(ours - theirs) for ours, theirs in pairs):.3g}"
        windows = ", ".join(f"{seconds:.4f}" for seconds in first["window_seconds"])
        peak = max(rank["gpu"].get("peak_allocated_bytes") or 0 for rank in mode["ranks"]) / GIB
        host = sum(rank["host_rss_bytes"] for rank in mode["ranks"]) / GIB
        lines.append(
            f"| {name} | ok | {first['step_seconds']:.4f} ({windows}) | {ratio} | {peak:.1f} | "
            f"{host:.1f} | {differs} |"
        )
    return lines


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: that nothing failed that should not."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget_seconds
    command = " ".join(["python experiments/zero3/run.py", *arguments])
    result: Json = {"command": command, "hardware": describe(options.device), "modes": {}}
    for mode in options.modes.split(","):
        if mode not in MODES:
            raise ValueError(f"--modes {mode!r} is unknown: choose of {', '.join(MODES)}")
        left = end - time.monotonic()
        if left < 10.0:
            print(f"{mode}: left out, no time", flush=True)
            continue
        result["modes"][mode] = run_mode(options, mode, left)
        write_json(options.out / "result.json", result)
    print("\n".join(table(result["modes"])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
