"""A step of 4 micro-batches: forward and backward only, layer-major, micro-batch-major, in turns.

    python experiments/layer_major/run.py --out DIR
    python experiments/layer_major/run.py --out DIR --device cpu --model toy --batch 2 --seq 16

One process, one GPU. DIR/result.json is rewritten after every round; the table comes last.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.processes import end, free_port
from experiments.common.records import Json, Workload, write_json
from experiments.common.sizes import SIZES, model_flops, size_of
from experiments.layer_major.report import table

CLOSING_SECONDS = 5.0
"""Kept free at the end of the time."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder for result.json")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--model", default="llama-3b", choices=list(SIZES))
    add("--batch", default=8, type=int, help="sequences a micro-batch")
    add("--seq", default=1024, type=int, help="tokens a sequence")
    add("--micro-batches", default=4, type=int, help="of a step; at most 4")
    add("--gpu-fraction", default=0.0, type=float)
    add("--clip", default=1.0, type=float, help="gradient clipping norm")
    add("--rounds", default=3, type=int, help="turns of every mode")
    add("--steps", default=2, type=int, help="timed steps of a turn; one more before them is not")
    add("--budget-seconds", default=225.0, type=float, help="no turn begins that would exceed it")
    return parser.parse_args(arguments)


def join(device: str) -> None:
    """The environment of a job of one rank, before anything looks at it."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    if device == "cpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def compare_gradients(engine: Any, modes: Sequence[Any]) -> Json:
    """Largest difference of a layer's gradients to those of the first mode, over the largest."""
    expected = engine.gradients(modes[0])
    found: Json = {}
    for mode in modes[1:]:
        worst = 0.0
        for ours, theirs in zip(engine.gradients(mode), expected, strict=True):
            difference = float((ours.float() - theirs.float()).abs().max())
            worst = max(worst, difference / max(float(theirs.float().abs().max()), 1e-30))
        found[mode.label] = worst
    return found


def turn(mode: Any, steps: int, device: str) -> Json:
    """A step that is not timed, then some that are; one wait at each end."""
    from experiments.common.memory import gpu_memory, reset_gpu_peak
    from experiments.common.timing import synchronize

    mode.step()
    synchronize(device)
    reset_gpu_peak(device)
    begin = time.perf_counter()
    losses = [mode.step() for _ in range(steps)]
    synchronize(device)
    seconds = (time.perf_counter() - begin) / steps
    mode.check()
    return {"seconds": seconds, "loss": float(losses[-1]), "gpu": gpu_memory(device)}


def measure(options: argparse.Namespace, began: float) -> Json:
    """All rounds, as many as there is time for."""
    from experiments.common.hardware import describe
    from experiments.layer_major import modes as ways

    workload = Workload(
        model=options.model, batch=options.batch, seq=options.seq, device=options.device
    )
    bare = ways.Bare(workload, options.micro_batches)
    engine = ways.Engine(
        workload, options.micro_batches, gpu_fraction=options.gpu_fraction, clip=options.clip
    )
    print(f"built after {time.monotonic() - began:.0f} s", flush=True)
    by_layer = [ways.LayerMajor(engine, "keep"), ways.LayerMajor(engine, "offload")]
    one_by_one = [ways.MicroBatchMajor(engine, recomputes=r) for r in (True, False)]
    modes = [
        bare.variant(recomputes=True),
        bare.variant(recomputes=False),
        *by_layer,
        *one_by_one,
    ]
    size = size_of(options.model)
    flops = model_flops(size, options.batch, options.seq) * options.micro_batches
    result: Json = {
        "command": shlex.join(["experiments/layer_major/run.py", *sys.argv[1:]]),
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "hardware": describe(options.device),
        "flops": flops,
        "gradients": compare_gradients(engine, [one_by_one[0], *by_layer, one_by_one[1]]),
        "modes": [{"label": m.label, "recomputes": m.recomputes, "turns": []} for m in modes],
    }
    print(f"gradients compared after {time.monotonic() - began:.0f} s", flush=True)
    longest = 0.0
    for number in range(options.rounds):
        for mode, record in zip(modes, result["modes"], strict=True):
            now = time.monotonic()
            if number and now - began + longest > options.budget_seconds - CLOSING_SECONDS:
                print(f"no time for {mode.label} in round {number + 1}", flush=True)
                continue
            record["turns"].append(turn(mode, options.steps, options.device))
            if "micro-batch" in mode.label or "layer" in mode.label:
                record["turns"][-1]["statistics"] = engine.statistics()
            longest = max(longest, time.monotonic() - now)
            print(f"{mode.label}: {record['turns'][-1]['seconds']:.4f} s", flush=True)
        write_json(options.out / "result.json", result)
    for record in result["modes"]:
        record["seconds"] = statistics.median(t["seconds"] for t in record["turns"])
    result["total_seconds"] = time.monotonic() - began
    return result


def main(arguments: Sequence[str]) -> int:
    """Measures, prints the table."""
    options = parse(arguments)
    if not 1 <= options.micro_batches <= 4:
        raise SystemExit(f"--micro-batches is {options.micro_batches}: choose 1 to 4")
    began = time.monotonic()
    join(options.device)
    result = measure(options, began)
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "result.json", result)
    text = table(result)
    (options.out / "table.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    end(main(sys.argv[1:]))
