"""`hytrain doctor`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from hytrain.errors import ConfigError
from hytrain.tools.cli.arguments import positive_int, rank_count

_FEWEST = 2**16


def add(doctor: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    doctor.description = (
        "Checks this machine for offloaded training: versions, cores, memory, copies, disk. Takes "
        "some seconds. Exits with 1 where something is bad."
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument(
        "--ranks",
        type=rank_count,
        default=1,
        metavar="N",
        help="ranks that will train on this host (default: 1)",
    )
    doctor.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="where checkpoints will be saved (default: the current folder)",
    )
    doctor.add_argument(
        "--elements",
        type=positive_int,
        metavar="N",
        help="length of the arrays that are measured (default: more than the caches hold)",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.elements is not None and arguments.elements < _FEWEST:
        raise ConfigError(
            f"--elements {arguments.elements}: give at least {_FEWEST}, or leave it out: of fewer "
            "the start of threads is measured, not memory"
        )
    # Imported here: it needs torch, which `hytrain --help` should not wait for.
    from hytrain.tools.doctor.report import examine, report_text

    try:
        findings = examine(arguments.folder, arguments.ranks, arguments.elements)
    except OSError as error:
        raise ConfigError(
            f"{arguments.folder} cannot be written ({error.strerror}): give the folder for "
            "checkpoints as --folder"
        ) from error
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(report_text(findings))
    return 1 if any(finding.verdict == "bad" for finding in findings) else 0
