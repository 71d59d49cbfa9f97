"""`hytrain plan`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add(plan: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    subjects = plan.add_subparsers(required=True, metavar="SUBJECT")
    _add_uneven(subjects.add_parser("uneven", help="solve a folder of published cases"))


def _add_uneven(uneven: argparse.ArgumentParser) -> None:
    uneven.add_argument(
        "--cases",
        type=Path,
        required=True,
        metavar="DIR",
        help="latencies.json, memory.json, gpu_memory_gb.json, expected.json",
    )
    uneven.add_argument("--json", action="store_true", help="print JSON instead of a table")
    uneven.set_defaults(run=_uneven)


def _uneven(arguments: argparse.Namespace) -> int:
    # Imported here: `hytrain --help` should not wait for numpy.
    from hytrain.planner import report, uneven_cases

    solved = report.solve_cases(uneven_cases.read_cases(arguments.cases))
    if arguments.json:
        print(json.dumps(report.cases_json(solved), indent=2))
    else:
        print(report.cases_table(solved))
    return 0
