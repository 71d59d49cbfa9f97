"""k solved beside the best fixed k, from launch-bound to GPU-bound: cells of a grid.

    python experiments/solve_k/regimes.py --cells 0.37B/4x512/16 0.95B/2x512/4/noclip --out DIR
    python experiments/solve_k/regimes.py --cells 0.37B/4x512/16/compiled 0.37B/4x512/16/graphs
    python experiments/solve_k/regimes.py --cells toy/2x16/2 --device cpu --out DIR --steps 30

A cell is MODEL/BATCHxTOKENS/CORES[/noclip][/compiled|/graphs[/whole]]: every step is clipped or
none; torch.compile of each block, or of the whole model, without CUDA graphs or with them. Cells of
one number of cores share a process, in which each has a new model and engine. It trains with k
solved for --steps steps and for --stay more (at most --stay-seconds), then measures the number of
layers that it has come to in turns with fixed fractions, those that can be the best several times.
Where another one was the best, the two alone take up to nine turns more, queued as in training: the
host may have been faster meanwhile, and the median of their ratios is what counts. Then that number
again in turns with forward and backward alone and with everything on the GPU (fp32 master weights,
torch's fused AdamW), compiled in the same way; with --turns 0, or where memory does not hold both,
forward and backward are measured before there is an engine. DIR/regimes.json is rewritten after
every cell, and a table is printed when all are measured or --budget-seconds are over: medians of a
step, medians of the turns' ratios, solved over the best fixed number, moves after the first steps
and in how many, and the cell's own seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.item_processes import describe_meanwhile, measure_items
from experiments.common.records import Json, write_json
from experiments.common.tables import markdown
from experiments.solve_k.regime_cells import FORM, Cell, grid
from experiments.solve_k.regime_worker import add_options


def _commands(arguments: argparse.Namespace) -> Callable[[Sequence[str]], list[str]]:
    options = [f"--device={arguments.device}", f"--stay-seconds={arguments.stay_seconds}"]
    options += [f"--{name}={getattr(arguments, name)}" for name in ("steps", "stay", "rounds")]
    options += [f"--turns={arguments.turns}"]
    worker = str(Path(__file__).with_name("regime_worker.py"))
    return lambda cells: [sys.executable, worker, *cells, *options]


def _measure(cells: dict[str, Cell], arguments: argparse.Namespace) -> Iterator[tuple[str, Json]]:
    """Every cell and its result; cells of a number of cores share a process."""
    deadline = time.monotonic() + arguments.budget_seconds
    for cores in dict.fromkeys(cell.cores for cell in cells.values()):
        yield from measure_items(
            [text for text, cell in cells.items() if cell.cores == cores],
            _commands(arguments),
            arguments.out / f"{cores}_cores.log",
            deadline=deadline,
            item_seconds=arguments.cell_seconds,
        )


HEADER = (
    "cell", "fwd+bwd", "AdamW", "hytrain", "over AdamW", "over fwd+bwd", "queued: over AdamW",
    "queued: over fwd+bwd", "k 0", "best fixed", "solved", "over best", "in the sweep",
    "late moves", "took s",
)  # fmt: skip


def _row(text: str, cell: Json) -> list[str]:
    """Of the last table; milliseconds."""
    if "failed" in cell:
        return [text, cell["failed"], *[""] * (len(HEADER) - 2)]
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
        of("queued_hytrain_over_all_gpu", 1.0, 3),
        of("queued_hytrain_over_compute", 1.0, 3),
        f"{1e3 * cell['fixed']['0']:.1f}" if "0" in cell["fixed"] else "-",
        f"{1e3 * cell['fixed'][str(best)]:.1f} ({best} of {layers})",
        f"{cell['solved']}",
        f"{cell['solved_over_best']:.3f}",
        f"{cell['sweep_over_best']:.3f}",
        f"{cell['late_moves']} in {cell['stayed']}",
        f"{sum(cell['seconds'].values()):.0f}",
    ]


def _line(text: str, cell: Json) -> str:
    """What a cell took at every number, and the moves, as soon as it is there."""
    if "failed" in cell:
        return f"{text}: {cell['failed']}\n{cell.get('log', '')}"
    fixed = "  ".join(f"{k}: {1e3 * float(s):.1f}" for k, s in cell["fixed"].items())
    path = " ".join(f"{m['step']}:{m['to']}" for m in cell["moves"])
    took = "  ".join(f"{part} {seconds:.1f}" for part, seconds in cell["seconds"].items())
    return f"{text}: [{fixed}] ms, moves {path}; s: {took}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cells", nargs="+", default=[], help=FORM)
    add("--list", action="store_true", help="print the grid's cells, and nothing else")
    add("--out", type=Path, default=Path(), help="folder for regimes.json and logs")
    add("--budget-seconds", type=float, default=3000.0, help="after which it ends")
    add("--cell-seconds", type=float, default=240.0, help="after which a cell counts as failed")
    add_options(parser)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(grid()))
        return
    cells = {text: Cell.of(text) for text in arguments.cells}
    arguments.out.mkdir(parents=True, exist_ok=True)
    hardware = describe_meanwhile(arguments.device)
    record: Json = {"command": sys.argv, "hardware": None, "cells": {}}
    for text, result in _measure(cells, arguments):
        record["hardware"] = hardware.result()
        record["cells"][text] = result
        write_json(arguments.out / "regimes.json", record)
        print(_line(text, result), flush=True)
    print(markdown(HEADER, [_row(text, cell) for text, cell in record["cells"].items()]))


if __name__ == "__main__":
    main()
