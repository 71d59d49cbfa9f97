"""A folder of profiles, so that a plan can be made for GPUs that are not at hand.

There is a file a model (with its sequence length and dtype), in which devices and hosts gather as
they are measured.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from hytrain.errors import PlanError
from hytrain.formats.moment_kinds import FP32
from hytrain.formats.profile_file import (
    ProfiledModel,
    ProfileFile,
    merge_profiles,
    read_profile,
    write_profile,
)

FOLDER_VARIABLE = "HYTRAIN_PROFILES"
"""Environment variable that names another folder than the default one."""


def default_folder() -> Path:
    """Where profiles gather unless another folder is given."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".local" / "share" / "hytrain" / "profiles"


def file_name(model: ProfiledModel) -> str:
    """The name of a model's file in a library.

    It begins with the model's name; the digits at its end tell models of one name apart.
    """
    readable = re.sub(r"[^A-Za-z0-9]+", "-", model.name).strip("-").lower() or "model"
    # Profiles from before there was a choice keep their names.
    without = {"moments"} if model.moments == FP32 else None
    digest = hashlib.sha256(model.model_dump_json(exclude=without).encode()).hexdigest()[:8]
    return f"{readable}-{model.seq_len}-{model.dtype}-{digest}.json"


def add_to_library(folder: Path, profile: ProfileFile) -> Path:
    """Merges a profile into the file of its model, which is made where there is none.

    Returns:
        The file.

    Raises:
        PlanError: the folder or the file cannot be read or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"cannot make the library {folder} ({error.strerror})") from None
    path = folder / file_name(profile.model)
    known = [read_profile(path)] if path.exists() else []
    write_profile(path, merge_profiles([*known, profile]))
    return path


def read_library(folder: Path) -> list[ProfileFile]:
    """All profiles of a folder, in the order of their names.

    Raises:
        PlanError: there is no such folder, or a file in it is no profile.
    """
    if not folder.is_dir():
        raise PlanError(
            f"there is no library {folder}: `hytrain profile --library` makes one, --library or "
            f"{FOLDER_VARIABLE} names another"
        )
    return [read_profile(path) for path in sorted(folder.glob("*.json"))]
