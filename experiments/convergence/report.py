"""The tables and the chart of a result.

python experiments/convergence/report.py out/convergence/result.json [--png FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.records import Json, read_json
from experiments.common.report import markdown
from experiments.convergence.cases import (
    ADAMW,
    HYTRAIN,
    HYTRAIN_MUON,
    MOMENTS,
    SYSTEM_SEEDS,
    TORCH_MUON,
    ZERO2,
    ZERO2_EAGER,
    ZERO2_GPU,
    hytrain_kind,
)
from experiments.convergence.curves import (
    WINDOW,
    largest_difference,
    last_common_step,
    smoothed,
)

YARDSTICK = ((ZERO2, ZERO2_GPU), (ZERO2, ZERO2_EAGER), (ZERO2_GPU, ZERO2_EAGER))
"""Runs of one system that differ in how their kernels round: of Adam, of attention, of both."""
PAIRS = (
    *YARDSTICK,
    *((HYTRAIN, ZERO2), (HYTRAIN, ZERO2_GPU), (HYTRAIN, ADAMW), (ADAMW, ZERO2)),
    (HYTRAIN_MUON, TORCH_MUON),
)
"""The kinds that are compared with the same seed."""
KINDS = (*map(hytrain_kind, MOMENTS), ADAMW, HYTRAIN_MUON, TORCH_MUON)
"""The kinds that are compared over several seeds."""

Trainings = dict[tuple[str, int], Json]


def by_case(result: Json) -> Trainings:
    """(kind, seed) -> training, for those with enough steps for the moving average."""
    found = {(t["kind"], t["seed"]): t for t in result["trainings"]}
    return {case: t for case, t in found.items() if len(t["losses"]) >= WINDOW}


def pair_rows(trainings: Trainings) -> list[Json]:
    """How far two trainings of one seed are apart, seed by seed."""
    found: list[Json] = []
    for one, other in PAIRS:
        for seed in SYSTEM_SEEDS:
            first, second = trainings.get((one, seed)), trainings.get((other, seed))
            if first is None or second is None:
                continue
            largest, mean = largest_difference(first["losses"], second["losses"])
            row: Json = {"of one seed and data": f"{one} / {other}", "seed": seed}
            row["steps"] = min(len(first["losses"]), len(second["losses"]))
            row |= {"largest difference": f"{largest:.4f}", "mean": f"{mean:.4f}"}
            step = last_common_step([first["held_out"], second["held_out"]])
            if step is not None:
                ends = [each["held_out"][str(step)] for each in (first, second)]
                row["held-out losses"] = f"{ends[0] - ends[1]:+.4f} after {step}"
            found.append(row)
    return found


def seeds_rows(trainings: Trainings) -> list[Json]:
    """Held-out losses of all seeds, differences of kinds beside those of seeds.

    A kind's difference is of trainings with the same seed: they see the same data in the same
    order from the same weights.
    """
    used = {case: t for case, t in trainings.items() if case[0] in KINDS and t["status"] == "ok"}
    used = used or {case: t for case, t in trainings.items() if case[0] in KINDS}
    step = last_common_step([t["held_out"] for t in used.values()]) if used else None
    if step is None:
        return []
    loss = {case: t["held_out"][str(step)] for case, t in used.items()}
    found: list[Json] = []
    for kind in KINDS:
        own = {seed: value for (name, seed), value in loss.items() if name == kind}
        if not own:
            continue
        row: Json = {f"held-out loss after {step} steps": kind}
        row |= {f"seed {seed}": f"{value:.4f}" for seed, value in sorted(own.items())}
        row["mean"] = f"{statistics.fmean(own.values()):.4f}"
        row["largest - least of seeds"] = f"{max(own.values()) - min(own.values()):.4f}"
        base = HYTRAIN_MUON if kind == TORCH_MUON else HYTRAIN
        gaps = [own[seed] - loss[base, seed] for seed in own if (base, seed) in loss]
        if gaps and kind not in (HYTRAIN, HYTRAIN_MUON):
            row["mean difference to hytrain's fp32 state"] = f"{statistics.fmean(gaps):+.4f}"
            row["largest, same seed"] = f"{max(map(abs, gaps)):.4f}"
        found.append(row)
    return found


def draw(trainings: Trainings, image: Path) -> None:
    """Three panels: one seed's systems, how far they are apart, and kinds of moments."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, gaps, kinds) = pyplot.subplots(
        1, 3, figsize=(15, 5.5), layout="constrained", dpi=90
    )
    for kind, style in ((ZERO2, "-"), (ZERO2_EAGER, "--"), (ADAMW, "-."), (HYTRAIN, ":")):
        if (kind, 0) in trainings:
            line = smoothed(trainings[kind, 0]["losses"])
            curves.plot(range(WINDOW, WINDOW + len(line)), line, style, label=kind, linewidth=1.6)
    curves.set(title="one seed", xlabel="step", ylabel="training loss (nats a token)")
    for number, (one, other) in enumerate(PAIRS):
        for seed in SYSTEM_SEEDS:
            first, second = trainings.get((one, seed)), trainings.get((other, seed))
            if first is None or second is None:
                continue
            steps = min(len(first["losses"]), len(second["losses"]))
            gap = smoothed(first["losses"][:steps]) - smoothed(second["losses"][:steps])
            gaps.plot(
                range(WINDOW, WINDOW + len(gap)), gap, color=f"C{number}", linewidth=1,
                linestyle="-" if (one, other) in YARDSTICK else "--",
                label=None if seed else f"{one} / {other}",
            )  # fmt: skip
    gaps.set(title="differences of curves, each seed", xlabel="step")
    for number, kind in enumerate(KINDS):
        for seed in sorted(s for k, s in trainings if k == kind):
            held = trainings[kind, seed]["held_out"]
            points = sorted((int(step), value) for step, value in held.items() if int(step))
            label = kind if seed == 0 else None
            kinds.plot(
                *zip(*points, strict=True), "o-", color=f"C{number}", alpha=0.6, markersize=3,
                linewidth=1, label=label,
            )  # fmt: skip
    kinds.set(title="held-out loss, each seed", xlabel="step")
    for axes in (curves, gaps, kinds):
        axes.grid(alpha=0.3)
        # Below the axes: seven lines cross in the middle one.
        axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables and draws the chart."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("result", type=Path)
    parser.add_argument("--png", type=Path, help="default: beside the result")
    options = parser.parse_args(argv)
    result = read_json(options.result)
    trainings = by_case(result)
    ended = [f"{t['kind']}, seed {t['seed']}: {t['status']} after {len(t['losses'])}"
             for t in result["trainings"] if t["status"] != "ok"]  # fmt: skip
    tables = [markdown(rows(trainings)) for rows in (pair_rows, seeds_rows)]
    print(result["hardware"], result["options"], "", *tables, sep="\n")
    if ended:
        print("", *ended, sep="\n")
    draw(trainings, options.png or options.result.parent / "convergence.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
