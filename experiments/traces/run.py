"""Records real runs, and holds what their traces say against what the runs then do.

    python experiments/traces/run.py --out DIR
    python experiments/traces/run.py --out DIR --runs "3b k 0" "3b solved"
    python experiments/traces/run.py --out DIR --device cpu --toy

A process a run: steps are recorded, then the run is timed in turns with variants that apply a fix
which the report names. DIR/RUN/ has the traces, DIR/result.json what was measured;
`experiments/traces/report.py DIR` prints the tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.hardware import describe
from experiments.common.processes import prepare, run_worker
from experiments.common.records import Json, write_json
from experiments.traces.cases import RUNS, Run

TOY = ("toy", 2, 16)


def folder_of(out: Path, label: str) -> Path:
    """Where a run's traces are."""
    return out / label.replace(" ", "_").replace(",", "")


def _run(run: Run, options: argparse.Namespace) -> Json:
    folder = folder_of(options.out, run.label).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model, batch, seq = TOY if options.toy else (run.model, run.batch, run.seq)
    job = run.job(options.device, str(folder), model, batch, seq)
    if run.system.startswith("deepspeed_"):
        prepare(job, [job.entry], 0, options.limit)
    ended = run_worker("experiments.traces.worker", job, folder, options.limit)
    found = ended.result or {"status": "killed", "log": ended.lines[-20:]}
    return {"job": job.to_json(), "wall_seconds": ended.wall_seconds, **found}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for result.json and traces")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--runs", nargs="+", default=[run.label for run in RUNS], help="labels, see cases.py")
    add("--toy", action="store_true", help="every model is a toy")
    add("--limit", type=float, default=150.0, help="seconds a run may take")
    options = parser.parse_args()
    unknown = set(options.runs) - {run.label for run in RUNS}
    if unknown:
        parser.error(f"--runs: {', '.join(sorted(unknown))} unknown: see cases.py")
    result: Json = {"command": sys.argv, "hardware": describe(options.device), "runs": {}}
    for run in RUNS:
        if run.label in options.runs:
            begin = time.monotonic()
            result["runs"][run.label] = found = _run(run, options)
            write_json(options.out / "result.json", result)
            print(f"{run.label}: {found['status']}, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
