"""A pytest plugin for DeepSpeed's tests: forks ranks with all imports, writes outcomes at once.

A hanging test of DeepSpeed ends the whole pytest or keeps it from ever ending: each outcome is
therefore written at once, and a test that has one already is not run again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

OUTCOMES = "DROPIN_OUTCOMES"
"""Environment variable: the file with a line for each test begun (status null) and ended."""
SAMPLE = "DROPIN_SAMPLE"
"""Environment variable: how many variants of each test are run, evenly spread; 0: all."""
_order = {"passed": 0, "skipped": 1, "failed": 2}
_current: dict[str, str] = {}


def _write(name: str, status: str | None, words: str = "") -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps({"name": name, "status": status, "words": words}) + "\n")


def pytest_configure(config: Any) -> None:
    """Makes the server that forks ranks import everything first."""
    del config
    import swapped_engine  # an error in the forkserver's own import would be silent

    multiprocessing.set_forkserver_preload([swapped_engine.__name__])


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out tests that are not in the sample, or have an outcome from an earlier run."""
    path = Path(os.environ[OUTCOMES])
    lines = path.read_text().splitlines() if path.exists() else []
    done = {entry["name"] for entry in map(json.loads, lines) if entry["status"]}
    chosen = [item for item in _sample(items) if item.nodeid not in done]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _sample(items: list[Any]) -> list[Any]:
    most = int(os.environ.get(SAMPLE, "0"))
    variants: dict[str, list[Any]] = {}
    for item in items:
        variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if not most:
        return list(items)
    return [
        found[(2 * number + 1) * len(found) // (2 * most)] if len(found) > most else found[number]
        for found in variants.values()
        for number in range(min(most, len(found)))
    ]


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    """Writes that a test begins."""
    del location
    _current.update(status="passed", words="")
    _write(nodeid, None)


def pytest_runtest_logreport(report: Any) -> None:
    """Keeps the worst outcome of setup, call and teardown."""
    if _order[report.outcome] <= _order[_current["status"]]:
        return
    _current["status"] = report.outcome
    if report.failed:
        text = report.longreprtext
        lines = [line for line in text.splitlines() if re.match(r"^E +\S", line)]
        _current["words"] = lines[-1][1:].strip()[:200] if lines else text[-200:]


def pytest_runtest_logfinish(nodeid: str, location: Any) -> None:
    """Writes the outcome of a test that has ended."""
    del location
    _write(nodeid, _current["status"], _current["words"])
