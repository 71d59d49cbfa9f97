"""k solved beside the best fixed k, from launch-bound to GPU-bound: cells of a grid.

    python experiments/solve_k/regimes.py --cells 0.37B/4x512/16 0.95B/2x512/4/noclip --out DIR
    python experiments/solve_k/regimes.py --cells 0.37B/4x512/16/compiled 0.37B/4x512/16/graphs
    python experiments/solve_k/regimes.py --cells toy/2x16/2 --device cpu --out DIR --steps 30

A cell is MODEL/BATCHxTOKENS/CORES[/noclip][/compiled|/graphs[/whole]]: every step is clipped or
none; torch.compile of each block, or of the whole model, without CUDA graphs or with them. Each has
a process of its own. It trains with k solved for --steps steps and for --stay more (at most
--stay-seconds), then measures the number of layers that it has come to in turns with fixed
fractions, those that can be the best several times. Where another one was the best, the two alone
take up to nine turns more, queued as in training: the host may have been faster meanwhile, and the
median of their ratios is what counts. Then that number again in turns with forward and backward
alone and with everything on the GPU (fp32 master weights, torch's fused AdamW), compiled in the
same way; with --turns 0, or where memory does not hold both, forward and backward are measured
before there is an engine. DIR/regimes.json has what tests replay.
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
from experiments.common.report import short
from experiments.solve_k.regime_cells import FORM, Cell, grid

KEPT = ("layers", "compute", "beside", "fixed", "solved", "best", "solved_over_best", "stayed",
        "late_moves", "launch_bound", "costs")  # fmt: skip
"""Fields of a cell in regimes.json."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, model=None, budget=3000.0)
    add = parser.add_argument
    add("--cells", nargs="+", default=[], metavar="CELL", help=FORM)
    add("--cell-seconds", type=float, default=240.0, help="after which a cell counts as failed")
    add("--steps", type=int, default=60, help="in which k is solved")
    add("--stay", type=int, default=60, help="more, in which it should not change")
    add("--stay-seconds", type=float, default=60.0, help="which these take at most")
    add("--rounds", type=int, default=3, help="of the fixed numbers, the near ones")
    add("--turns", type=int, default=5, help="with the rival; 0: without it")
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each cell."""
    asked = {k: getattr(options, k) for k in ("steps", "stay", "stay_seconds", "rounds", "turns")}
    return [
        {
            **{"label": text, "cell": text, "worker": "experiments.solve_k.regime_worker"},
            **{"device": options.device, "cores": Cell.of(text).cores, **asked},
            "seconds": options.cell_seconds / runner.LIMIT_FACTOR,
        }
        for text in options.cells
    ]


def rows(result: Json) -> list[Json]:
    """A row for each cell, with milliseconds and the turns' ratios."""
    found: list[Json] = []
    for record in result["jobs"]:
        if record["status"] != records.OK:
            found.append({"cell": record["label"], **report.failure(record)})
            continue
        (cell,) = record["ranks"]
        beside = cell["beside"]
        ratios = [f"{p}hytrain_over_{n}" for p in ("", "queued_") for n in ("all_gpu", "compute")]
        found.append(
            {
                "cell": record["label"],
                "forward_backward_ms": short(1e3 * cell["compute"]),
                **{f"{n}_ms": short(1e3 * beside[n]) for n in ("all_gpu", "hytrain") if beside},
                **{name: short(beside[name]) for name in ratios if beside},
                "fixed_ms": " ".join(f"{n}: {1e3 * s:.1f}" for n, s in cell["fixed"].items()),
                "solved (best) of": f"{cell['solved']} ({cell['best']}) of {cell['layers']}",
                "over_best": short(cell["solved_over_best"]),
                "in_the_sweep": short(cell["sweep_over_best"]),
                "late_moves": f"{cell['late_moves']} in {cell['stayed']}",
                "took_s": record["wall_seconds"],
            }
        )
    return found


def kept(result: Json) -> Json:
    """What is recorded of a run, and replayed by tests."""
    cells = {
        record["label"]: {key: record["ranks"][0][key] for key in KEPT}
        for record in result["jobs"]
        if record["status"] == records.OK
    }
    return {"command": result["command"], "hardware": result["hardware"], "cells": cells}


def main(options: argparse.Namespace) -> int:
    """Runs the command."""
    if options.list and not options.cells:
        print("\n".join(grid()))
        return 0

    def text(result: Json) -> str:
        records.write_json(options.out / "regimes.json", kept(result))
        return report.of_result(rows)(result)

    return runner.main(options, jobs(options), text)


if __name__ == "__main__":
    raise SystemExit(main(parse(sys.argv[1:])))
