"""Test data that lies beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def shared_folder(*parts: str) -> Path:
    """Returns a folder of the test data beside the repository; skips the test if it is missing."""
    given = os.environ.get("HYTRAIN_SHARED")
    root = Path(given) if given else REPOSITORY.parent / "shared"
    folder = root.joinpath(*parts)
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set HYTRAIN_SHARED to the folder that has it")
    return folder
