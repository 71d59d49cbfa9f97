"""The plain data that passes between a command, its measuring processes and the report. No torch.

A job is a dict: what `runner.run_job` starts, and what its worker reads (see runner.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Json = dict[str, Any]

GIB = 2**30

OK = "ok"
RUNNING = "running"
"""The status of a result whose process has not ended yet."""
OUT_OF_MEMORY = "out of memory"
HOST_MEMORY_LOW = "host memory low"
REFUSED = "refused"
"""hytrain refused, with an error that says what the user has to change."""
FAILED = "failed"
TIMED_OUT = "timed out"
SKIPPED = "skipped"


def lines_of(data: Json) -> str:
    """JSON with a line for each element of a list, and for each entry of a dict of dicts."""

    def value_of(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict | list):
            return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n]"
        if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            each = (f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
            return "{\n" + ",\n".join(each) + "\n}"
        return json.dumps(value)

    parts = (f"{json.dumps(key)}: {value_of(value)}" for key, value in data.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_json(path: Path, data: Json) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(lines_of(data))
    os.replace(temporary, path)


def read_json(path: Path) -> Json:
    """Reads one JSON object."""
    data = json.loads(path.read_text())
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data
