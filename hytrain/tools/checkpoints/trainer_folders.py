"""Checkpoints as Hugging Face's Trainer lays them out: a folder "checkpoint-N" for each."""

from __future__ import annotations

import re
from pathlib import Path

from hytrain.checkpoint.universal import LATEST


def trainer_folders(output: Path) -> list[Path]:
    """The folders of checkpoints in a Trainer's output folder, oldest first; none elsewhere."""
    if not output.is_dir() or (output / LATEST[0]).exists():
        return []
    found = [path for path in output.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
    found = [path for path in found if (path / LATEST[0]).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def one_checkpoint(given: Path, tag: str | None) -> tuple[Path, str | None]:
    """Of a Trainer's output folder the newest checkpoint's folder, or that of a tag or of a name as
    "checkpoint-50", and the tag there; elsewhere what was given."""
    for folder in reversed(trainer_folders(given)):
        if tag is None or tag == folder.name:
            return folder, None
        if tag in _names(folder):
            return folder, tag
    return given, tag


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]
