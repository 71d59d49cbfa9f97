"""What launching takes of the host beside updates on the CPU, and the copies that go with them.

Both count: on the host of an H100 launching took 1.1 to 1.2 times as long beside updates alone, and
1.4 times with their copies.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Generator
from typing import NamedTuple

_TURNS = 16
_TENTH = 10


@contextlib.contextmanager
def updating(update: Callable[[], object]) -> Generator[None]:
    """While it lasts, another thread updates, once after another."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            update()

    worker = threading.Thread(target=go_on, daemon=True)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


class Launching(NamedTuple):
    """How launching differs from what it takes alone, and from itself.

    Attributes:
        slowdown: ratio of what it takes beside updates to what it takes alone; at least 1.
        spread: by which the slow turns alone took longer than the fast ones, as a share of these:
            the slowest but a tenth of all, and the fastest but a tenth.
    """

    slowdown: float
    spread: float


def measure_launching(launch: Callable[[], float], update: Callable[[], object]) -> Launching:
    """Launches alone and beside updates, in turns.

    Args:
        launch: launches some passes and returns the seconds of one.
        update: updates once, as in training.
    """
    update()  # touches pages, wakes threads
    alone: list[float] = []
    ratios: list[float] = []
    for _ in range(_TURNS):  # in turns: hosts are faster and slower for seconds on end
        alone.append(launch())
        with updating(update):
            ratios.append(launch() / alone[-1])
    alone.sort()
    left_out = len(alone) // _TENTH
    spread = alone[-1 - left_out] / alone[left_out] - 1.0
    return Launching(max(1.0, statistics.median(ratios)), spread)
