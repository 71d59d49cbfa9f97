"""The training script's modules stand beside it, as the launcher finds them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPT_DIR = Path(__file__).resolve().parents[3] / "experiments" / "train_lm"
sys.path.insert(0, str(SCRIPT_DIR))


@pytest.fixture
def text_files(tmp_path: Path) -> list[Path]:
    """Three text files of different content and length."""
    return _write_texts(tmp_path / "text")


@pytest.fixture(scope="session")
def shared_text_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same, for runs that several tests look at."""
    return _write_texts(tmp_path_factory.mktemp("shared") / "text")


def _write_texts(folder: Path) -> list[Path]:
    folder.mkdir()
    for name, repeats in (("a.txt", 300), ("b.py", 200), ("c.md", 100)):
        lines = [f"{name} line {i} of {repeats}" for i in range(repeats)]
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    return sorted(folder.iterdir())
