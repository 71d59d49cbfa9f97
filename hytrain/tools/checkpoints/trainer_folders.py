"""Checkpoints as Hugging Face's Trainer lays them out: a folder "checkpoint-N" for each."""

from __future__ import annotations

import re
from pathlib import Path

LATEST = "latest"


def trainer_folders(output: Path) -> list[Path]:
    """The folders of checkpoints in a Trainer's output folder, oldest first; none elsewhere."""
    if not output.is_dir() or (output / LATEST).exists():
        return []
    found = [path for path in output.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
    found = [path for path in found if (path / LATEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def newest_folder(given: Path, tag: str | None = None) -> Path:
    """Where a Trainer's newest checkpoint (or that of a tag) lies; the folder itself elsewhere."""
    folders = trainer_folders(given)
    if tag is not None:
        folders = [folder for folder in folders if tag in (folder.name, *_names(folder))]
    return folders[-1] if folders else given


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()]
