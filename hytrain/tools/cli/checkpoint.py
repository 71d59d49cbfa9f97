"""`hytrain checkpoint`: looks at what was saved."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path


def add(checkpoint: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    actions = checkpoint.add_subparsers(required=True, metavar="ACTION")
    words = "read every byte and hold it against what was saved"
    verify = actions.add_parser("verify", help=words)
    verify.add_argument("--tag", help="which checkpoint (default: the latest)")
    verify.add_argument("--all", action="store_true", help="all checkpoints of the folder")
    verify.set_defaults(run=_verify)
    info = actions.add_parser("info", help="which checkpoints there are, and what is in them")
    info.set_defaults(run=_info)
    for action in (verify, info):
        action.add_argument("folder", type=Path, metavar="DIR", help="folder of checkpoints")
        action.add_argument("--json", action="store_true", help="print JSON")


def _verify(arguments: argparse.Namespace) -> int:
    # Imported here: it needs torch, which `hytrain --help` should not wait for.
    from hytrain.checkpoint.inspection import locate, saved_checkpoints, verify
    from hytrain.tools.checkpoints.report import verdict_text

    given: Path = arguments.folder
    folders = (
        [given / tag for tag in saved_checkpoints(given)]
        if arguments.all
        else [locate(given, arguments.tag)]
    )
    verdicts = [verify(folder) for folder in folders]
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    else:
        print("\n".join(verdict_text(verdict) for verdict in verdicts))
    return 0 if verdicts and all(verdict.problem is None for verdict in verdicts) else 1


def _info(arguments: argparse.Namespace) -> int:
    from hytrain.checkpoint.inspection import describe_folder, locate
    from hytrain.tools.checkpoints.report import folder_text

    given: Path = arguments.folder
    facts = list(describe_folder(given)) if given.is_dir() else []
    if not facts:
        one = locate(given, None)  # a checkpoint's own folder, or the error that there is none
        facts = [fact for fact in describe_folder(one.parent) if fact.tag == one.name]
    if arguments.json:
        print(json.dumps([asdict(fact) for fact in facts], indent=2))
    else:
        print(folder_text(given, facts))
    return 0
