"""k solved beside the best fixed k, from launch-bound to GPU-bound: one process a cell of a grid.

    python experiments/solve_k/regimes.py --cells 0.37B/4x512/16 0.95B/2x512/4/noclip --out DIR
    python experiments/solve_k/regimes.py --cells 0.37B/4x512/16/compiled 0.37B/4x512/16/graphs
    python experiments/solve_k/regimes.py --cells toy/2x16/2 --device cpu --out DIR --steps 30

A cell is MODEL/BATCHxTOKENS/CORES[/noclip][/compiled|/graphs[/whole]]: every step is clipped or
none; torch.compile of each block, or of the whole model, without CUDA graphs or with them. Its
process trains with k solved for --steps steps and for --stay more, then measures the number of
layers that it has come to in turns with fixed fractions, some steps of each, several times. Then
that number again in turns with forward and backward alone and with everything on the GPU (fp32
master weights, torch's fused AdamW), compiled in the same way; where memory does not hold both,
forward and backward are measured before there is an engine. DIR/regimes.json is rewritten after
every cell, and a table is printed: medians of a step, medians of the turns' ratios, solved over the
best fixed number, and moves after the first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.hardware import describe
from experiments.common.processes import free_port
from experiments.common.records import Json, write_json
from experiments.common.tables import markdown
from experiments.solve_k.regime_cells import FORM, Cell, Contest
from hytrain.placement.costs import StepCosts

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
MARK = "RESULT "


def _moves(engine: Any, after: int) -> list[Json]:
    return [
        {"step": d.step, "from": d.gpu_layers_before, "to": d.gpu_layers_target, "why": d.reason}
        for d in engine.optimizer.placement.decisions
        if d.step > after and d.gpu_layers_before != d.gpu_layers_target
    ]


def _rounded(costs: StepCosts | None) -> Any:
    """For a file: of times four digits say enough."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [rounded(v) for v in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return None if costs is None else rounded(costs.to_json())


def work(cell: Cell, device: str, arguments: argparse.Namespace) -> Json:
    """A cell's process: k solved, then fixed fractions in turns with it, then the rival."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: cell.cores])
    contest = Contest(cell, device)
    has_rival = contest.rival_fits
    compute = [] if has_rival else contest.compute(12)[4:]
    if has_rival:
        contest.start_rival()
    contest.start_engine()
    decisions = contest.engine.optimizer.placement
    contest.train(arguments.steps)
    settled = contest.train(arguments.stay)
    layers = decisions.decisions[0].num_layers
    solved = decisions.controller.num_gpu_layers
    early, late = _moves(contest.engine, 0), _moves(contest.engine, arguments.steps)
    fixed, costs = _sweep(contest, layers, solved, arguments.rounds)
    best = min(fixed, key=lambda number: fixed[number])
    contest.engine.set_gpu_fraction(solved / layers)
    rival = _beside_rival(contest, arguments.turns) if has_rival else {}
    contest.engine.destroy()
    return {
        "layers": layers,
        "compute": statistics.median(compute) if compute else rival["compute"],
        "all_gpu": rival.get("all_gpu"),
        "beside": rival,
        "fixed": {str(number): seconds for number, seconds in fixed.items()},
        "solved": solved,
        "settled_seconds": statistics.median(settled or [0.0]),
        "best": best,
        "solved_over_best": fixed[solved] / fixed[best],
        "costs": costs,
        "moves": early,
        "late_moves": len(late),
    }


def _sweep(
    contest: Contest, layers: int, solved: int, rounds: int
) -> tuple[dict[int, float], Json]:
    """Median seconds at fixed numbers of layers, measured in turns, and costs at some of them."""
    decisions = contest.engine.optimizer.placement
    numbers = sorted({round(f * layers) for f in FRACTIONS} | {solved, layers // 2})
    costs: Json = {}
    seen: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(rounds):
        for number in numbers if turn % 2 == 0 else reversed(numbers):
            contest.engine.set_gpu_fraction(number / layers)
            # Moves end beside the first of them.
            seen[number] += contest.train(9)[4:]
            if number in (0, layers // 2, layers):
                costs[str(number)] = _rounded(decisions.costs())
    return {number: statistics.median(times) for number, times in seen.items()}, costs


def _beside_rival(contest: Contest, turns: int) -> Json:
    """The engine, the rival and bare passes in turns: medians, and medians of the turns' ratios."""
    runs = {"hytrain": contest.train, "all_gpu": contest.all_gpu, "compute": contest.compute}
    for run in runs.values():
        run(4)  # the rival's first steps allocate, and compile
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            seen[name].append(statistics.median(runs[name](7)[2:]))
    ratios = {
        f"hytrain_over_{name}": statistics.median(
            own / other for own, other in zip(seen["hytrain"], seen[name], strict=True)
        )
        for name in ("all_gpu", "compute")
    }
    return {name: statistics.median(times) for name, times in seen.items()} | ratios


def _run(text: str, arguments: argparse.Namespace) -> Json:
    environment = dict(
        os.environ,
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    own = [sys.executable, str(Path(__file__).resolve()), "--work", text]
    own += ["--device", arguments.device, "--steps", str(arguments.steps)]
    own += ["--stay", str(arguments.stay), "--rounds", str(arguments.rounds)]
    own += ["--turns", str(arguments.turns)]
    log = arguments.out / (text.replace("/", "_") + ".log")
    with log.open("w") as errors:
        done = subprocess.run(
            own, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not results:
        return {"failed": done.returncode, "log": log.read_text()[-2000:]}
    return json.loads(results[-1][len(MARK) :])


HEADER = (
    "cell", "fwd+bwd", "AdamW", "hytrain", "over AdamW", "over fwd+bwd", "k 0", "best fixed",
    "solved", "over best", "late moves",
)  # fmt: skip


def _row(text: str, cell: Json) -> list[str]:
    """Of the last table; milliseconds."""
    if "failed" in cell:
        return [text, "failed: see its log", *[""] * (len(HEADER) - 2)]
    beside = cell["beside"]

    def of(name: str, scale: float, digits: int) -> str:
        return f"{scale * beside[name]:.{digits}f}" if name in beside else "-"

    best, layers = cell["best"], cell["layers"]
    return [
        text,
        f"{1e3 * cell['compute']:.1f}",
        of("all_gpu", 1e3, 1),
        of("hytrain", 1e3, 1),
        of("hytrain_over_all_gpu", 1.0, 3),
        of("hytrain_over_compute", 1.0, 3),
        f"{1e3 * cell['fixed']['0']:.1f}",
        f"{1e3 * cell['fixed'][str(best)]:.1f} ({best} of {layers})",
        f"{cell['solved']}",
        f"{cell['solved_over_best']:.3f}",
        f"{cell['late_moves']}",
    ]


def _line(text: str, cell: Json) -> str:
    """What a cell took at every number, and the moves, as soon as it is there."""
    if "failed" in cell:
        return f"{text}: failed\n{cell['log']}"
    fixed = "  ".join(f"{k}: {1e3 * float(s):.1f}" for k, s in cell["fixed"].items())
    path = " ".join(f"{m['step']}:{m['to']}" for m in cell["moves"])
    return f"{text}: [{fixed}] ms, moves {path}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cells", nargs="+", default=[], help=FORM)
    add("--out", type=Path, default=Path(), help="folder for regimes.json and logs")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--steps", type=int, default=60, help="in which k is solved")
    add("--stay", type=int, default=60, help="more, in which it should not change")
    add("--rounds", type=int, default=3, help="of every fixed number")
    add("--turns", type=int, default=5, help="with the rival")
    add("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        cell = Cell.of(arguments.work)
        result = work(cell, arguments.device, arguments)
        print(MARK + json.dumps(result), flush=True)
        return
    cells = {text: Cell.of(text) for text in arguments.cells}
    arguments.out.mkdir(parents=True, exist_ok=True)
    record: Json = {"command": sys.argv, "hardware": describe(arguments.device), "cells": {}}
    for text in cells:
        record["cells"][text] = _run(text, arguments)
        write_json(arguments.out / "regimes.json", record)
        print(_line(text, record["cells"][text]), flush=True)
    print(markdown(HEADER, [_row(text, cell) for text, cell in record["cells"].items()]))


if __name__ == "__main__":
    main()
