"""How launching differs from what it takes alone, and from itself.

Beside updates on the CPU it takes longer, and beside the copies that go with them. Both count: on
the host of an H100 launching took 1.1 to 1.2 times as long beside updates alone, and 1.4 times with
their copies.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Generator, Sequence

_TURNS = 16
_TENTH = 10


@contextlib.contextmanager
def repeating(work: Callable[[], object]) -> Generator[None]:
    """While it lasts, another thread does the work, once after another."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():
            work()

    worker = threading.Thread(target=go_on, daemon=True)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


def measure_slowdown(launch: Callable[[], float], update: Callable[[], object]) -> float:
    """Ratio of what launching takes beside updates to what it takes alone, in turns; at least 1.

    ``launch``: launches some passes and returns the seconds of one; ``update``: updates once, as in
    training.
    """
    update()  # touches pages, wakes threads
    ratios: list[float] = []
    for _ in range(_TURNS):  # in turns: hosts are faster and slower for seconds on end
        alone = launch()
        with repeating(update):
            ratios.append(launch() / alone)
    return max(1.0, statistics.median(ratios))


def spread(turns: Sequence[float]) -> float:
    """By which slow turns took longer than fast ones, as a share of these.

    The slowest but a tenth of all, and the fastest but a tenth: a stall is not a slow turn.
    """
    ascending = sorted(turns)
    left_out = len(ascending) // _TENTH
    return ascending[-1 - left_out] / ascending[left_out] - 1.0
