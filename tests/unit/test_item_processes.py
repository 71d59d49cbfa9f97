"""Items measured by processes that fail, hang or run out of time: the others keep their results."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.common.item_processes import measure_items

_WORKER = """
import os, sys, time
from experiments.common.item_processes import print_result
for item in sys.argv[1:]:
    print("something else")
    if item == "dies":
        sys.exit("why it died")
    if item == "hangs":
        time.sleep(600)
    print_result(item, {"process": os.getpid()})
"""


def _command(items: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", _WORKER, *items]


def test_a_process_is_kept_until_an_item_breaks_it(tmp_path: Path) -> None:
    items = ["a", "b", "dies", "c", "hangs", "d"]
    options = {"deadline": time.monotonic() + 200.0, "item_seconds": 6.0}
    found = list(measure_items(items, _command, tmp_path / "log", **options))
    assert [item for item, _ in found] == items
    results = dict(found)
    assert results["a"] == results["b"] != results["c"] != results["d"]
    assert results["dies"]["failed"] == "its process ended with status 1"
    assert "why it died" in results["dies"]["log"]
    assert results["hangs"]["failed"] == "it took longer than 6 s"


def test_it_ends_at_the_deadline(tmp_path: Path) -> None:
    begin = time.monotonic()
    options = {"deadline": begin + 1.5, "item_seconds": 100.0}
    found = dict(measure_items(["hangs", "a"], _command, tmp_path / "log", **options))
    assert time.monotonic() - begin < 60.0  # neither an item's 100 s nor its own 600
    assert {result["failed"] for result in found.values()} == {"no time was left"}
