"""What the traces say beside what was measured.

python experiments/traces/report.py DIR [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.records import Json, read_json, write_json
from experiments.common.tables import markdown
from experiments.traces.cases import ACROSS
from experiments.traces.run import folder_of
from hytrain.tools.trace.accounts import COMPUTE_PARTS
from hytrain.tools.trace.analysis import Analysis, analyse
from hytrain.tools.trace.load import load

SLACK = 0.03
"""By which a measured gain may exceed a ceiling: hosts drift between the turns."""


def _analysis(path: Path) -> Analysis | None:
    return analyse(load([path])) if path.exists() else None


def _share(analysis: Analysis | None) -> float | None:
    if analysis is None:
        return None
    parts = analysis.mean_parts(analysis.slowest)
    return sum(parts[name] for name in COMPUTE_PARTS) / analysis.step_seconds(analysis.slowest)


def summary(out: Path, label: str, run: Json) -> Json:
    """Of one run: busy shares of the recorder's file, of torch.profiler's by the report, and of
    torch.profiler itself; ceilings; medians of the turns."""
    folder = folder_of(out, label)
    own = _analysis(folder / "trace_rank0.json")
    foreign = _analysis(folder / "torch_profiler.json")
    shown = own or foreign
    found: Json = {
        "status": run["status"],
        "busy": {
            "recorded": _share(own),
            "profiler_by_report": _share(foreign),
            "profiler": run.get("profiler", {}).get("busy"),
        },
        "seconds": {k: statistics.median(v) for k, v in run.get("seconds", {}).items()},
        "gpu_fraction": run.get("gpu_fraction"),
        "ceilings": {},
    }
    if shown is not None:
        found["ceilings"] = {fix.name: fix.gain for fix in shown.fixes}
        rank = shown.ranks[0]
        found["mostly"] = [
            [cause.cause, cause.seconds / shown.step_seconds(0)] for cause in shown.causes[:3]
        ]
        if rank.header is not None:
            found["recording_overhead"] = rank.header.recording_overhead
    return found


def _pair(recorded: str, fix: str, applied: str, runs: Json, before: float, after: float) -> Json:
    ceiling = runs[recorded]["ceilings"].get(fix)
    gain = 1.0 - after / before
    holds = None if ceiling is None else gain <= ceiling + SLACK
    return {
        "recorded": recorded,
        "fix": fix,
        "applied": applied,
        "ceiling": ceiling,
        "measured": gain,
        "holds": holds,
    }


def pairs(out: Json, runs: Json) -> list[Json]:
    """Each fix that was applied: what its ceiling said, and what it won."""
    found: list[Json] = []
    for label, run in out["runs"].items():
        if run["status"] != "ok":
            continue
        seconds = runs[label]["seconds"]
        for variant in run["job"]["entry"]["options"]["variants"]:
            after = seconds[variant["label"]] / variant["batch_factor"]
            found.append(_pair(label, variant["fix"], variant["label"], runs, seconds[""], after))
    for recorded, fix, applied in ACROSS:
        if all(runs.get(one, {}).get("status") == "ok" for one in (recorded, applied)):
            before, after = (runs[one]["seconds"][""] for one in (recorded, applied))
            found.append(_pair(recorded, fix, applied, runs, before, after))
    return found


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def tables(found: Json) -> str:
    """Markdown."""
    rows = []
    for label, run in found["runs"].items():
        if run["status"] != "ok":
            rows.append([label, run["status"], "", "", "", "", ""])
            continue
        busy = run["busy"]
        causes = ", ".join(f"{cause} {share:.0%}" for cause, share in run.get("mostly", ()))
        shares = [_percent(busy[k]) for k in ("recorded", "profiler_by_report", "profiler")]
        rows.append(
            [
                label,
                f"{1e3 * run['seconds']['']:.1f}",
                *shares,
                _percent(run.get("recording_overhead")),
                causes,
            ]
        )
    head = ["run", "step ms", "busy", "its profile", "torch.profiler", "recording", "idle because"]
    text = markdown(head, rows)
    rows = [
        [
            pair["recorded"],
            pair["fix"],
            pair["applied"],
            _percent(pair["ceiling"]),
            _percent(pair["measured"]),
            {None: "-", True: "yes", False: "NO"}[pair["holds"]],
        ]
        for pair in found["pairs"]
    ]
    head = ["recorded", "fix", "applied as", "ceiling", "won", "holds"]
    return text + "\n" + markdown(head, rows)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of run.py")
    parser.add_argument("--json", type=Path, help="also written here")
    options = parser.parse_args()
    out = read_json(options.out / "result.json")
    runs = {label: summary(options.out, label, run) for label, run in out["runs"].items()}
    found = {
        "command": out["command"],
        "hardware": out["hardware"],
        "runs": runs,
        "pairs": pairs(out, runs),
    }
    if options.json:
        write_json(options.json, found)
    print(tables(found))


if __name__ == "__main__":
    main()
