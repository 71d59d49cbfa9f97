"""Records real runs, and holds what their traces say against what the runs then do.

    python experiments/traces/run.py --out DIR
    python experiments/traces/run.py --out DIR --only "3b k 0" "3b solved"
    python experiments/traces/run.py --out DIR --device cpu --toy

A process a run: steps are recorded, then the run is timed in turns with variants that apply a fix
which the report names. DIR/RUN/ has the traces.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.report import Claim, short

SLACK = 0.03
"""Share by which a measured step may be below its ceiling: hosts drift between the turns."""
SOLVING_STEPS = 80
"""Steps after which k has settled; a fixed k is recorded after RECORD_AFTER steps."""
RECORD_AFTER = 10
RECORDED = 4


def _k(fraction: float) -> Json:
    return {"label": f"k {fraction:g}", "fix": "more GPU layers", "gpu_fraction": fraction}


def _batch(factor: int) -> Json:
    return {"label": f"batch x{factor}", "fix": "larger batch", "batch_factor": factor}


_SMALL: Json = {"model": "llama-0.4b", "batch": 4, "seq": 512}
_MIDDLE: Json = {"model": "llama-1b"}
RUNS: dict[str, Json] = {
    "1b k 0": {**_MIDDLE, "variants": [_k(0.5), _k(1.0), _batch(2)]},
    "1b k 0 no clipping": {**_MIDDLE, "clip": None, "direct": True},
    "1b k 0 few threads": {**_MIDDLE, "cpu_threads": 4},
    "0.4b k 1": {**_SMALL, "gpu_fraction": 1.0, "variants": [_batch(4)]},
    "0.4b k 0.5": {**_SMALL, "gpu_fraction": 0.5, "variants": [_k(1.0)]},
    "3b k 0": {"variants": [_k(0.5), _k(0.9)]},
    "3b solved": {"gpu_fraction": "solve"},
    "3b ZeRO-2 offload": {"system": "deepspeed_zero2_offload"},
}
"""The recorded runs, and the variants that are timed beside each, each with its fix."""
ACROSS = (
    ("1b k 0", "no clipping", "1b k 0 no clipping"),
    ("1b k 0 few threads", "more cores", "1b k 0"),
)
"""(recorded run, fix, the same run with the fix), for runs in processes of their own."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = runner.parser(__doc__, budget=1200.0)
    parser.add_argument("--toy", action="store_true", help="every model is a toy")
    return parser.parse_args(arguments)


def jobs(options: argparse.Namespace) -> list[Json]:
    """A job for each run."""
    found: list[Json] = []
    for label, settings in RUNS.items():
        job: Json = {
            **{"label": label, "worker": "experiments.traces.worker", "seconds": 60.0},
            **{"system": "hytrain", "gpu_fraction": 0.0, "variants": []},
            "clip": 1e-3,  # every step exceeds it
            **runner.workload(options),
            **settings,
        }
        first = (SOLVING_STEPS if job["gpu_fraction"] == "solve" else RECORD_AFTER) + 1
        job |= {"first": first, "recorded": RECORDED}
        if options.toy:
            job |= {"model": "toy", "batch": 2, "seq": 16}
        found.append(job)
    return found


def _trace(path: str | None) -> Any:
    """The report's analysis of a trace's file; None if there is none."""
    from hytrain.tools.trace.analysis import analyse
    from hytrain.tools.trace.load import load

    return analyse(load([Path(path)])) if path is not None and Path(path).exists() else None


def _busy(analysis: Any) -> float | None:
    from hytrain.tools.trace.step_times import COMPUTE_PARTS

    if analysis is None:
        return None
    parts, slowest = analysis.mean_parts(analysis.slowest), analysis.slowest
    return short(sum(parts[name] for name in COMPUTE_PARTS) / analysis.step_seconds(slowest))


def rows(result: Json) -> list[Json]:
    """A row for each run, then one for each fix that was applied."""
    found: list[Json] = []
    ceilings: dict[str, dict[str, float]] = {}
    seconds: dict[str, dict[str, float]] = {}
    for record in result["jobs"]:
        label = record["label"]
        if record["status"] != records.OK:
            found.append({"recorded": label, **report.failure(record)})
            continue
        (rank,) = record["ranks"]
        own, foreign = (_trace(rank["files"].get(k)) for k in ("recorder", "profiler"))
        analysis = own or foreign
        ceilings[label] = {fix.name: fix.step_seconds for fix in analysis.fixes}
        seconds[label] = {k: statistics.median(v) for k, v in rank["seconds"].items()}
        header = None if own is None else own.ranks[0].header
        found.append(
            {
                **{"recorded": label, "step_s": short(seconds[label][""])},
                **{"busy_recorded": _busy(own), "busy_profile_by_report": _busy(foreign)},
                "busy_profiler": short(rank["busy"]),
                "recording_overhead": None if header is None else short(header.recording_overhead),
                "idle_because": [
                    f"{c.cause} {c.seconds / analysis.step_seconds(0):.0%}"
                    for c in analysis.causes[:3]
                ],
            }
        )
    for record in result["jobs"]:
        for variant in record["job"]["variants"] if record["label"] in seconds else ():
            after = seconds[record["label"]][variant["label"]] / variant.get("batch_factor", 1)
            found.append(_pair(record["label"], variant["fix"], variant["label"], ceilings, after))
    for recorded, fix, applied in ACROSS:
        if recorded in ceilings and applied in seconds:
            found.append(_pair(recorded, fix, applied, ceilings, seconds[applied][""]))
    return found


def _pair(
    recorded: str, fix: str, applied: str, ceilings: dict[str, dict[str, float]], after: float
) -> Json:
    """The row of an applied fix; `after`: seconds a step, of a larger batch for as many tokens."""
    least = ceilings[recorded].get(fix)
    row = {"recorded": recorded, "fix": fix, "applied": applied, "at_least_s": short(least)}
    return {**row, "measured_s": short(after)}


def claims(rows: Sequence[Json]) -> list[Claim]:
    """No fix makes a run faster than its ceiling says; the busy share is torch.profiler's."""
    found: list[Claim] = []
    for row in rows:
        if row.get("at_least_s") is not None:
            text = f"{row['recorded']}, {row['applied']}: measured step over its ceiling"
            value = row["measured_s"] / row["at_least_s"]
            found.append(Claim(text, value, 1.0 - SLACK, at_least=True))
        both = row.get("busy_profile_by_report"), row.get("busy_profiler")
        if both[0] is not None and both[1] is not None:
            text = f"{row['recorded']}: busy share, difference to torch.profiler's"
            found.append(Claim(text, abs(both[0] - both[1]), 0.02))
    return found


if __name__ == "__main__":
    asked = parse(sys.argv[1:])
    raise SystemExit(runner.main(asked, jobs(asked), report.of_result(rows, claims)))
