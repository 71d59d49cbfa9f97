"""`hytrain checkpoint`: inspects checkpoints, and merges the parts that hosts have saved."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from hytrain.errors import CheckpointError
from hytrain.tools.cli.arguments import check_folders


def add(checkpoint: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    actions = checkpoint.add_subparsers(required=True, metavar="{info,verify,merge}")
    checkpoint.description = (
        "Looks at checkpoints. Their weights, as safetensors: `hytrain export`."
    )
    info = actions.add_parser("info", help="list the checkpoints, and what is in them")
    info.set_defaults(run=_info)
    words = "read every byte and compare it with what was saved"
    verify = actions.add_parser("verify", help=words)
    verify.add_argument("--all", action="store_true", help="verify all checkpoints of the folder")
    verify.set_defaults(run=_verify)
    merge = actions.add_parser("merge", help="make one of the parts that hosts have saved apart")
    merge.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="folder that a host has saved"
    )
    words = "folder for the merged checkpoint"
    merge.add_argument("--out", type=Path, required=True, metavar="DIR", help=words)
    merge.add_argument("--tag", help="which checkpoint (default: each folder's latest)")
    merge.set_defaults(run=_merge)
    for action, which in ((verify, "the latest"), (info, "all")):
        help_text = "folder of checkpoints, or a Trainer's output folder"
        action.add_argument("folder", type=Path, metavar="DIR", help=help_text)
        action.add_argument("--tag", help=f"which checkpoint (default: {which})")
        action.add_argument("--json", action="store_true", help="print JSON instead of text")


def _verify(arguments: argparse.Namespace) -> int:
    check_folders(arguments.folder)
    # Imported here: it needs torch, which `hytrain --help` should not wait for.
    from hytrain.checkpoint.inspection import (
        Verdict,
        locate,
        one_checkpoint,
        saved_checkpoints,
        trainer_folders,
        verify,
    )
    from hytrain.tools.checkpoints.report import verdict_text

    given: Path = arguments.folder
    if arguments.all and arguments.tag is not None:
        raise CheckpointError(f"--all with --tag {arguments.tag}: leave one of them out")
    if arguments.all:
        places = trainer_folders(given) or [given]
        folders = [place / tag for place in places for tag in saved_checkpoints(place)]
        folders = folders or [locate(given, None)]  # or the error that there is none
    else:
        folders = [locate(*one_checkpoint(given, arguments.tag))]

    def read(number: int, folder: Path) -> Verdict:
        if sys.stderr.isatty():  # large ones take minutes
            print(f"reading {folder} ({number} of {len(folders)})", file=sys.stderr)
        return verify(folder)

    verdicts = [read(number, folder) for number, folder in enumerate(folders, 1)]
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    else:
        print("\n".join(verdict_text(verdict) for verdict in verdicts))
        if len(trainer_folders(given)) > len(folders):
            print(f"one of the {len(trainer_folders(given))} checkpoints there; --all for the rest")
    return 1 if any(verdict.problems for verdict in verdicts) else 0


def _merge(arguments: argparse.Namespace) -> int:
    check_folders(*arguments.folders)
    from hytrain.checkpoint.inspection import locate
    from hytrain.checkpoint.merge import merge_parts

    folders = [locate(folder, arguments.tag) for folder in arguments.folders]
    print(f"{merge_parts(folders, arguments.out)} is whole, of {len(folders)} parts")
    return 0


def _info(arguments: argparse.Namespace) -> int:
    check_folders(arguments.folder)
    from hytrain.checkpoint.inspection import describe_folder, locate, trainer_folders
    from hytrain.tools.checkpoints.report import folder_text

    given: Path = arguments.folder
    trainers = trainer_folders(given)
    places = trainers or [given]
    found = [(at, fact) for at in places if at.is_dir() for fact in describe_folder(at)]
    # Each of a Trainer's folders has a latest one; the Trainer resumes from the last folder's.
    found = [(at, replace(f, is_latest=f.is_latest and at == places[-1])) for at, f in found]
    if not found:
        one = locate(given, None)  # a checkpoint's own folder, or the error that there is none
        found = [(one.parent, f) for f in describe_folder(one.parent) if f.tag == one.name]
    if arguments.tag is not None:
        tags = ", ".join(fact.tag for _, fact in found)
        found = [
            (at, f) for at, f in found if arguments.tag in (f.tag, at.name if trainers else "")
        ]
        if not found:
            raise CheckpointError(f"{given} has no checkpoint {arguments.tag!r}, but {tags}")
    if arguments.json:
        print(json.dumps([{"folder": str(at)} | asdict(f) for at, f in found], indent=2))
    else:
        names = [at.name for at, _ in found] if trainers else None
        print(folder_text(given, [fact for _, fact in found], names))
    return 0
