"""`hytrain trace`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hytrain.tools.cli.arguments import check_outputs


def add(trace: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parts = trace.add_subparsers(required=True, metavar="PART")
    _add_merge(parts.add_parser("merge", help="the traces of several ranks as one file"))


def _add_merge(merge: argparse.ArgumentParser) -> None:
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a rank's trace each")
    merge.add_argument("--out", required=True, type=Path, help="file to write (.json or .json.gz)")
    merge.set_defaults(run=_merge)


def _merge(arguments: argparse.Namespace) -> int:
    # Imported here: `hytrain --help` should not wait for pydantic.
    from hytrain.tools.trace.merge import merge_files

    inputs = [("FILE", path) for path in arguments.files]
    check_outputs({"--out": arguments.out}, inputs)
    print(merge_files(arguments.files, arguments.out))
    return 0
