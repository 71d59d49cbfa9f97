"""The published 10 B setting of HyTrainDNN: the loss curve of 300 steps, and their times.

    python experiments/convergence/ten_b.py --out out/ten_b

A Llama of 9.84 B parameters (30 blocks of width 5120), 8 x 1024 tokens a step, `"hytrain": {}`,
gradients clipped to a norm of 1. Progress is written to `ten_b.json` repeatedly.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import hardware, records, runner
from experiments.common.records import Json
from experiments.convergence.cases import training_config
from experiments.convergence.curves import read_curve, read_records, smoothed
from experiments.convergence.run import start_training

WRITE_SECONDS = 5.0
LAST_STEPS = 100
"""Number of last steps, whose times are the result: k is solved by then."""
WINDOW = 20
"""Steps of the chart's moving average."""


def ds_config(steps: int, micro_batch: int, *, on_gpu: bool) -> Json:
    """What a user would write, with a schedule of this many steps."""
    config = training_config(
        micro_batch, steps=steps, warmup=max(2, steps // 10), lr=1e-4, beta2=0.95, on_gpu=on_gpu
    )
    return {**config, "hytrain": {}}


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and draws what was reached; the exit status is 1 if no step was made."""
    options = _parser().parse_args(argv)
    until = time.monotonic() + options.limit_seconds
    result: Json = {
        "hardware": hardware.describe(options.device),
        "options": {k: getattr(options, k) for k in ("model", "steps", "micro_batch", "seq_len")},
    }
    config = ds_config(options.steps, options.micro_batch, on_gpu=options.device == "cuda")
    asked = [
        *("--model", options.model, "--steps", options.steps, "--seq-len", options.seq_len),
        *("--eval-sequences", 2 * options.micro_batch, "--reference-steps", 5),
    ]
    runner.end_on_sigterm()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        process = start_training(folder, config, options.device, asked)
        try:
            while process.poll() is None and time.monotonic() < until:
                time.sleep(min(WRITE_SECONDS, max(0.1, until - time.monotonic())))
                result.update(_reached(folder))
                records.write_json(options.out / "ten_b.json", result)
                losses = result["losses"]
                print(f"{until - time.monotonic():4.0f} s left: {len(losses)} steps", flush=True)
        finally:
            runner.stop(process)
        print(*runner.tail(folder / "log"), sep="\n")  # the closing table, or why there is none
        if not result.get("losses"):
            return 1
    draw(result, options.out / "ten_b.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else "",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("out/ten_b"))
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--model", default="llama-10b", help="of train_lm")
    add("--steps", type=int, default=300)
    add("--micro-batch", type=int, default=8)
    add("--seq-len", type=int, default=1024)
    add("--limit-seconds", type=float, default=470.0, help="after which it is ended")
    return parser


def _reached(folder: Path) -> Json:
    """Loss, time and k of each step, held-out losses, and time of forward and backward alone."""
    metrics = folder / "out" / "metrics.jsonl"
    curve = read_curve(metrics)
    steps = [record for record in read_records(metrics) if "step_s" in record]
    reference = folder / "out" / "reference.json"
    last = [record["step_s"] for record in steps[-LAST_STEPS:]]
    return {
        "losses": curve.losses,
        "step_seconds": [round(r["step_s"], 4) for r in steps],
        "k": [r.get("k") for r in steps],
        "clipped": sum(r.get("clip_coefficient", 1.0) < 1.0 for r in steps),
        "held_out": curve.held_out,
        "last_median_seconds": statistics.median(last) if last else None,
        "reference_seconds": records.read_json(reference)["median"] if reference.exists() else None,
        "gpu_memory_gib": steps[-1].get("gpu_memory_gib") if steps else None,
        "host_memory_gib": steps[-1]["host_memory_gib"] if steps else None,
    }


def draw(result: Json, image: Path) -> None:
    """Draws the loss over steps, and below it each step's time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses, seconds = result["losses"], result["step_seconds"]
    steps = range(1, len(losses) + 1)
    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, height_ratios=[2.5, 1], layout="constrained"
    )
    upper.plot(steps, losses, linewidth=0.8, alpha=0.5, label="training batch")
    if len(losses) >= WINDOW:
        upper.plot(steps[WINDOW - 1 :], smoothed(losses, WINDOW), label=f"mean of {WINDOW} steps")
    held_out = sorted((int(step), value) for step, value in result["held_out"].items())
    if held_out:
        upper.plot(*zip(*held_out, strict=True), "o", label="held out")
    upper.set(ylabel="loss (nats a token)")
    lower.plot(steps, seconds, linewidth=0.8, label="step")
    if result["reference_seconds"]:
        lower.axhline(
            result["reference_seconds"], linestyle="--", color="0.4", label="forward and backward"
        )
    lower.set(xlabel="step", ylabel="seconds", ylim=(0, 2.5 * statistics.median(seconds)))
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(image, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
