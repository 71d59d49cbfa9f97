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
"""By which a measured step may be shorter than its ceiling says: hosts drift between the turns."""


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
        found["ceilings"] = {fix.name: fix.step_seconds for fix in shown.fixes}
        rank = shown.ranks[0]
        found["mostly"] = [
            [cause.cause, cause.seconds / shown.step_seconds(0)] for cause in shown.causes[:3]
        ]
        if rank.header is not None:
            found["recording_overhead"] = rank.header.recording_overhead
            found["unprofiled"] = rank.header.unprofiled_step_s
    return found


def _pair(recorded: str, fix: str, applied: str, runs: Json, after: float) -> Json:
    """A fix that was applied; `after` are seconds a step, of a larger batch for as many tokens."""
    least = runs[recorded]["ceilings"].get(fix)
    return {
        "recorded": recorded,
        "fix": fix,
        "applied": applied,
        "at_least": least,
        "measured": after,
        "holds": None if least is None else least <= after * (1.0 + SLACK),
    }


def pairs(out: Json, runs: Json) -> list[Json]:
    """Each fix that was applied: the shortest step by its ceiling, and the measured one."""
    found: list[Json] = []
    for label, run in out["runs"].items():
        if run["status"] != "ok":
            continue
        seconds = runs[label]["seconds"]
        for variant in run["job"]["entry"]["options"]["variants"]:
            after = seconds[variant["label"]] / variant["batch_factor"]
            found.append(_pair(label, variant["fix"], variant["label"], runs, after))
    for recorded, fix, applied in ACROSS:
        if all(runs.get(one, {}).get("status") == "ok" for one in (recorded, applied)):
            after = runs[applied]["seconds"][""]
            found.append(_pair(recorded, fix, applied, runs, after))
    return found


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _unprofiled(found: Json, pair: Json) -> float | None:
    """The recorded run's step without recording."""
    return found["runs"][pair["recorded"]].get("unprofiled")


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
                _ms(run["seconds"].get("", run.get("unprofiled"))),
                *shares,
                _percent(run.get("recording_overhead")),
                causes,
            ]
        )
    head = ["run", "step", "busy", "its profile", "torch.profiler", "recording", "idle because"]
    text = markdown(head, rows)
    rows = [
        [
            pair["recorded"],
            pair["fix"],
            pair["applied"],
            _ms(_unprofiled(found, pair)),
            _ms(pair["at_least"]),
            _ms(pair["measured"]),
            {None: "-", True: "yes", False: "NO"}[pair["holds"]],
        ]
        for pair in found["pairs"]
    ]
    head = ["recorded", "fix", "applied as", "step", "with it at least", "measured", "holds"]
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
