"""The plain data that passes between the command, the measuring processes and the report.

No torch here: the report must run on a machine that has none.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

Json = dict[str, Any]

GIB = 2**30

SCHEMA = 1

OK = "ok"
FAILED = "failed"
OUT_OF_MEMORY = "out of memory"
TIMED_OUT = "timed out"
SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What every system of a part trains."""

    model: str
    batch: int
    seq: int
    device: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """How often a system steps, and when it counts as slow."""

    windows: int
    steps: int
    """Steps in a window."""
    warmup: int
    slow_seconds: float = 1.5
    """A system whose step takes longer gets short windows and a short warm-up."""
    slow_steps: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a part: one system with its options, measured in its own process."""

    label: str
    system: str
    clip: float | None = None
    """Gradient clipping norm; None where the system runs without clipping."""
    options: Json = dataclasses.field(default_factory=dict)
    optional: bool = False
    """An optional line is dropped without complaint where the part's time is used up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the measuring process is given."""

    entry: Entry
    workload: Workload
    measurement: Measurement

    def to_json(self) -> Json:
        """As plain data, for the file handed to the measuring process."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Json) -> Job:
        """The inverse of to_json."""
        return cls(
            entry=Entry(**data["entry"]),
            workload=Workload(**data["workload"]),
            measurement=Measurement(**data["measurement"]),
        )


def write_json(path: Path, data: Json) -> None:
    """Write so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)


def read_json(path: Path) -> Json:
    """Read one JSON object."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data
