"""What the commands' arguments may be, and how an error is told."""

from __future__ import annotations

import argparse


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


def one_line(error: Exception) -> str:
    """An error's message without line breaks."""
    return " ".join(line.strip() for line in str(error).splitlines())
