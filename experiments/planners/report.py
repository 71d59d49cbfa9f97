"""The tables of results: what each planner's plan costs, and how long it searched.

    python experiments/planners/report.py OUT/result.json [...] [--results FILE]

Several results (of parts of the planners) are put together. With --results the rows are written as
JSON too, with machine, versions and commands: results.json of this folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.records import Json
from experiments.common.tables import markdown

HYTRAIN = "hytrain"
YARDSTICKS = ("their_seconds", "our_seconds", "schedule_seconds")
"""Sailor's simulator, hytrain's formula, and 1F1B played through."""

HEADER = (
    "planner",
    "Sailor's simulator, s",
    "hytrain's formula, s",
    "1F1B played through, s",
    "search s (CPU s)",
    "note",
)
SUMMARY_HEADER = (
    "case",
    "hytrain, s",
    "bound",
    "CPU s",
    "found after",
    "best other, s",
    "its CPU s",
    "ratio",
    "1F1B, s",
    "best other, s",
    "ratio",
)


def merged(results: Sequence[Json]) -> dict[str, dict[str, Json]]:
    """Case -> planner -> its run, of all results; of the same run the last."""
    found: dict[str, dict[str, Json]] = {}
    for result in results:
        for case, of_case in result["cases"].items():
            found.setdefault(case, {}).update(of_case["runs"])
    return found


def best_other(runs: dict[str, Json], key: str) -> tuple[str, Json] | None:
    """The cheapest plan that is not hytrain's, by one of the yardsticks."""
    others = {
        name: run for name, run in runs.items() if name != HYTRAIN and run.get(key) is not None
    }
    return min(others.items(), key=lambda item: item[1][key]) if others else None


def shortfalls(cases: dict[str, dict[str, Json]], *, tolerance: float = 1e-9) -> list[str]:
    """Where another plan is cheaper than hytrain's, by any yardstick; a line each."""
    lines: list[str] = []
    for case, runs in cases.items():
        mine = runs.get(HYTRAIN)
        for key in YARDSTICKS:
            best = best_other(runs, key)
            if best is None or mine is None:
                continue
            if mine[key] > best[1][key] * (1 + tolerance):
                lines.append(
                    f"{case}: {best[0]} {best[1][key]:.6g} < hytrain {mine[key]:.6g} ({key})"
                )
    return lines


def summary_rows(cases: dict[str, dict[str, Json]]) -> list[list[str]]:
    """Under SUMMARY_HEADER, by their simulator."""
    rows: list[list[str]] = []
    for case, runs in cases.items():
        mine, best = runs.get(HYTRAIN), best_other(runs, "their_seconds")
        if mine is None or best is None:
            continue
        name, other = best
        rows.append(
            [
                case,
                f"**{mine['their_seconds']:.4f}**",
                "optimal" if mine["optimal"] else f"{mine['bound']:.4f}",
                f"{mine['cpu_seconds']:.1f}",
                f"{mine['best_after_cpu_seconds']:.1f}",
                f"{other['their_seconds']:.4f} ({name})",
                f"{other['cpu_seconds']:.1f}",
                f"{other['their_seconds'] / mine['their_seconds']:.3f}",
                *_schedule(mine, best_other(runs, "schedule_seconds")),
            ]
        )
    return rows


def _schedule(mine: Json, best: tuple[str, Json] | None) -> list[str]:
    own = mine.get("schedule_seconds")
    if own is None or best is None:
        return ["", "", ""]
    name, other = best
    seconds = other["schedule_seconds"]
    return [f"{own:.4f}", f"{seconds:.4f} ({name})", f"{seconds / own:.3f}"]


def case_rows(runs: dict[str, Json]) -> list[list[str]]:
    """Under HEADER, cheapest first."""
    order = sorted(runs.items(), key=lambda item: item[1].get("their_seconds") or float("inf"))
    return [
        [
            name,
            _number(run.get("their_seconds")),
            _number(run.get("our_seconds")),
            _number(run.get("schedule_seconds")),
            f"{run['search_seconds']:.2f} ({run['cpu_seconds']:.2f})"
            if "search_seconds" in run
            else "-",
            run.get("error") or run.get("note") or "",
        ]
        for name, run in order
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def text_of(results: Sequence[Json]) -> str:
    """All of it."""
    cases = merged(results)
    parts = [markdown(SUMMARY_HEADER, summary_rows(cases))]
    parts += [f"### {case}\n\n{markdown(HEADER, case_rows(runs))}" for case, runs in cases.items()]
    found = shortfalls(cases)
    parts.append(
        "\n".join(found) if found else "hytrain's plan is nowhere beaten, by any of the yardsticks."
    )
    return "\n".join(parts)


def results_of(results: Sequence[Json]) -> Json:
    """What results.json holds."""
    hardware = results[0]["hardware"]
    rows: list[Json] = []
    for case, runs in merged(results).items():
        for name, run in runs.items():
            kept = {
                key: value for key, value in run.items() if key not in ("plan", "our_memory_fits")
            }
            if name == HYTRAIN:
                kept["plan"] = _short_plan(run["plan"])
            rows.append({"case": case, "planner": name, **kept})
    return {
        "machine": {key: hardware[key] for key in ("gpu", "cpu", "cores", "python", "versions")},
        "artefact": results[0]["artefact"],
        "runs": [
            {
                "date": result["hardware"]["date"],
                "commit": result["hardware"]["commit"],
                "command": result["command"],
                "limit_seconds": result["limit_seconds"],
            }
            for result in results
        ],
        "rows": rows,
    }


def _short_plan(plan: Json) -> Json:
    """Stages as [first layer, last layer, {TYPE_ZONE tpN: replicas}]."""
    pipeline = plan["pipeline_list"][0]
    stages: list[list[object]] = []
    for layers, replicas in zip(
        pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True
    ):
        counts: dict[str, int] = {}
        for machines, tp in replicas:
            name = f"{machines[0][0]}_{machines[0][2]} tp{tp}"
            counts[name] = counts.get(name, 0) + 1
        stages.append([layers[0], layers[-1], counts])
    return {"micro_batch": plan["mbs"], "stages": stages}


def main(arguments: Sequence[str]) -> None:
    """Print the tables; an error status where another plan is cheaper."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    results = [records.read_json(path) for path in options.result]
    print(text_of(results))
    if options.results:
        records.write_json(options.results, results_of(results))
    if shortfalls(merged(results)):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
