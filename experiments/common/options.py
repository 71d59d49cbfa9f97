"""What the experiments' command lines share."""

from __future__ import annotations

from experiments.common import records
from experiments.common.records import Entry, Json

LIMIT_FACTOR = 2.5
"""A process may take this many times its expected seconds before it counts as hung."""


def numbers(text: str) -> tuple[float, ...]:
    """`0.3,0.5` as numbers."""
    return tuple(float(word) for word in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """`1,2,4` as whole numbers."""
    return tuple(int(word) for word in text.split(","))


def named(entries: list[Entry], only: str | None) -> list[Entry]:
    """The entries whose labels `--only` names; all without it.

    Raises:
        ValueError: a label that no entry has.
    """
    if only is None:
        return entries
    wanted = {label.strip() for label in only.split(",")}
    unknown = wanted - {entry.label for entry in entries}
    if unknown:
        known = ", ".join(dict.fromkeys(entry.label for entry in entries))
        raise ValueError(f"--only names {sorted(unknown)}, but the part has: {known}")
    return [entry for entry in entries if entry.label in wanted]


def skipped(remaining: float, expected: float) -> Json:
    """The record of an entry that there was no time for."""
    return {
        "status": records.SKIPPED,
        "log": [f"{remaining:.0f} s left, about {expected:.0f} s needed"],
        "result": None,
    }
