"""Measures items one by one in a process that is kept from item to item. No torch here.

A process that measured one item only would spend a third of its time on imports. What one item
breaks costs the others nothing: a process that dies, or takes too long for an item, is replaced by
one for the items after it. Whatever happens, it ends at the deadline with what there is.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from experiments.common.processes import REPOSITORY, extensions_dir, free_port, stop, tail
from experiments.common.records import Json

_MARK = "RESULT "


def describe_meanwhile(device: str) -> Future[Json]:
    """What it is measured on, found while the first process imports: torch takes seconds."""

    def describe() -> Json:
        from experiments.common import hardware

        return hardware.describe(device)

    return ThreadPoolExecutor(1).submit(describe)


def print_result(item: str, result: Json) -> None:
    """In the process: an item is measured."""
    print(_MARK + json.dumps({"item": item, "result": result}), flush=True)


def measure_items(
    items: Sequence[str],
    command: Callable[[Sequence[str]], list[str]],
    log: Path,
    *,
    deadline: float,
    item_seconds: float,
) -> Iterator[tuple[str, Json]]:
    """Every item with its result as soon as it is there; one that has none says why in "failed".

    Args:
        items: in the order in which they are measured.
        command: of a process that measures these items in this order.
        log: for what the processes print besides results.
        deadline: of ``time.monotonic``.
        item_seconds: what one item may take, the process's start included.
    """
    left = list(items)
    with log.open("ab") as output:
        while left and time.monotonic() < deadline:
            process, lines = _start(command(left), output)
            try:
                why = yield from _results(process, lines, left, deadline, item_seconds)
            finally:
                stop(process)
            if left and time.monotonic() < deadline:
                yield left.pop(0), {"failed": why, "log": "\n".join(tail(log))}
    for item in left:
        yield item, {"failed": "no time was left"}


def _results(
    process: subprocess.Popen[bytes],
    lines: queue.Queue[str | None],
    left: list[str],
    deadline: float,
    item_seconds: float,
) -> Iterator[tuple[str, Json]]:
    """Takes measured items off the list; returns why the process gives no more."""
    while left:
        limit = min(deadline, time.monotonic() + item_seconds)
        try:
            line = lines.get(timeout=max(0.0, limit - time.monotonic()))
        except queue.Empty:
            return f"it took longer than {item_seconds:.0f} s"
        if line is None:
            return f"its process ended with status {process.wait()}"
        found = json.loads(line)
        left.remove(found["item"])
        yield found["item"], found["result"]
    return ""


def _start(
    command: list[str], output: BinaryIO
) -> tuple[subprocess.Popen[bytes], queue.Queue[str | None]]:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCH_EXTENSIONS_DIR": extensions_dir(),
    }
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=output,
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            text = raw.decode(errors="replace")
            if text.startswith(_MARK):
                lines.put(text[len(_MARK) :])
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return process, lines
