"""What the commands' arguments may be, and how an error is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_DEFAULT_LIBRARY = ""


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def rank_number(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rank: ranks count from 0")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def positive_ints(text: str) -> tuple[int, ...]:
    """Positive whole numbers with commas between them."""
    return tuple(positive_int(part) for part in text.split(","))


def positive_floats(text: str) -> tuple[float, ...]:
    """Finite positive numbers with commas between them."""
    return tuple(positive_float(part) for part in text.split(","))


def add_library(group: Any, words: str) -> None:
    """``--library``, with or without a folder, for a parser or a group of its arguments."""
    group.add_argument(
        "--library",
        nargs="?",
        const=_DEFAULT_LIBRARY,
        metavar="DIR",
        help=f"{words} (without DIR: $HYTRAIN_PROFILES, else ~/.local/share/hytrain/profiles)",
    )


def library_folder(given: str) -> Path:
    """The folder that ``--library`` names."""
    # Imported here: `hytrain --help` should not wait for pydantic.
    from hytrain.planner.library import default_folder

    return default_folder() if given == _DEFAULT_LIBRARY else Path(given)


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(line.strip() for line in str(error).splitlines())
