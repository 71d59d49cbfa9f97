"""Room on the disk: checked before anything is written, and reported if there was none."""

from __future__ import annotations

import shutil
from pathlib import Path

from hytrain.errors import CheckpointError, size_text


def check_room(folder: Path, num_bytes: int, takes: str, remedy: str) -> None:
    """Raises a CheckpointError if there is less space; ``takes``: what needs it, and a verb."""
    if (free := free_bytes(folder)) < num_bytes:
        raise CheckpointError(
            f"{folder} has {size_text(free)} free, and {takes} {size_text(num_bytes)}: {remedy}"
        )


def room_text(folder: Path, num_bytes: int) -> str:
    """Message text for a write that found no space: what the whole takes, and what is free."""
    try:
        free = f"{size_text(free_bytes(folder))} are free"
    except OSError as error:
        return f"how much is free is not known ({error})"
    return (
        f"the checkpoint takes {size_text(num_bytes)} in all, and beside what is written of it "
        f"{free}"
    )


def free_bytes(folder: Path) -> int:
    """Bytes that are free in a folder's file system."""
    return shutil.disk_usage(folder).free
