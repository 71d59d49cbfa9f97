"""For tests that damage a checkpoint: a copy of it, and an engine that shall refuse it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resume import Run, engine_of, train

TAG = "last"
CLIENT = {"best": 0.5, "seen": {3}, "mean": torch.arange(3.0), "order": [(1, "a")]}


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    """Checkpoints of ``Run()``: "older" after one step, "last" after two, with ``CLIENT``."""
    folder = tmp_path_factory.mktemp("original")
    with engine_of(Run()) as engine:
        for number, tag in enumerate(("older", TAG)):
            train(engine, number, number + 1)
            engine.save_checkpoint(folder, tag=tag, client_state=CLIENT)
    return folder


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
