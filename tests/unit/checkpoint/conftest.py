"""For tests that damage a checkpoint: a copy of it, and an engine that shall refuse it.

A file has a fixture ``original`` of its own: the folder of checkpoints, made once.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.resume import Run, engine_of, train


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints, to be damaged."""
    shutil.copytree(original, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture(scope="module")
def engine(process_group: None) -> Iterator[Any]:
    """An engine in the middle of a run."""
    with engine_of(Run().another()) as built:
        train(built, 0, 1)
        yield built
