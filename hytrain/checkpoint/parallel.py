"""Threads for what waits for a disk, or sums bytes: neither needs Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_THREADS = 8
"""Of a rank, at most."""


def reading_threads() -> int:
    """Threads that one call reads and sums a file by."""
    return min(_THREADS, len(os.sched_getaffinity(0)))


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    call: Callable[[_Item], _Result], items: Sequence[_Item], *, waits: bool = False
) -> list[_Result]:
    """Calls a function for each item, some at a time.

    Args:
        call: the function.
        items: what it is called for.
        waits: it waits for a disk most of the time: threads may be more than there are cores.

    Returns:
        What it has returned, in the items' order.

    Raises:
        Exception: the first of what it raised; all calls that had begun have ended.
    """
    threads = min(_THREADS if waits else reading_threads(), len(items))
    if threads <= 1:
        return [call(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, items))
