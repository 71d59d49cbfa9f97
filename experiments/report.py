"""An experiment's rows and claims: printed, and kept as small JSON (its results.json).

    python experiments/report.py EXPERIMENT RUN=FILE [RUN=FILE ...] [--out FILE]
    python experiments/report.py EXPERIMENT experiments/EXPERIMENT/results.json

A FILE is what `run.py` of the experiment writes (`result.json`), or what `hytrain bench kernel
--json` prints; RUN is how the README calls it. Machine, versions, commit and command of every run
come first, then a row for all that was measured, then what is decided from them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies one level above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.common import report
from experiments.common.records import Json, lines_of, read_json

EXPERIMENTS = (
    *("kernel_bench", "layer_major", "long_context", "memory", "moment_kinds", "muon"),
    *("offload_step", "solve_k", "traces", "unequal_gpus", "weak_scaling", "zero3"),
)


def _kernel_bench(result: Json) -> list[Json]:
    """G parameters/s, GB/s and threads of every subject."""
    return [
        {
            name: [round(v["gparams_per_s"], 4), round(v["gbytes_per_s"], 3), v["num_threads"]]
            for name, v in result.items()
            if isinstance(v, dict) and "gparams_per_s" in v
        }
    ]


def of(experiment: str) -> tuple[report.Rows, report.Claims]:
    """Returns the functions that make an experiment's rows of a result, and its claims of rows."""
    if experiment == "kernel_bench":
        return _kernel_bench, report.no_claims
    module: Any = importlib.import_module(f"experiments.{experiment}.run")
    return module.rows, getattr(module, "claims", report.no_claims)


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("runs", nargs="+", metavar="RUN=FILE")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows, claims = of(options.experiment)
    results: dict[str, Json] = {}
    for run in options.runs:
        name, separator, path = run.rpartition("=")
        if name in results or (len(options.runs) > 1 and not separator):
            parser.error(f"{run!r}: several runs are given as RUN=FILE, each name once")
        results[name or "run"] = read_json(Path(path))
    (*_, last) = results.values()
    try:
        found = last if "rows" in last else report.summary(rows, results)
    except ValueError as error:
        parser.error(str(error))
    print(report.text_of(found, claims))
    if options.out is not None:
        options.out.write_text(lines_of(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
