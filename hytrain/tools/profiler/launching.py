"""What launching takes of the host beside updates on the CPU."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Callable, Generator

from hytrain.tools.profiler.rates import UpdateArrays

_TURNS = 3


@contextlib.contextmanager
def updating(arrays: UpdateArrays, threads: int) -> Generator[None]:
    """While it lasts, so many threads update on the CPU, one pass after another."""
    is_over = threading.Event()

    def update() -> None:
        while not is_over.is_set():
            arrays.update(threads)

    worker = threading.Thread(target=update, daemon=True)
    worker.start()
    try:
        yield
    finally:
        is_over.set()
        worker.join()


def launch_slowdown(launch: Callable[[], float], arrays: UpdateArrays, threads: int) -> float:
    """Ratio of what launching takes beside updates to what it takes alone; at least 1.

    Args:
        launch: launches some passes and returns the seconds of one.
        arrays: that are updated.
        threads: that update.
    """
    arrays.update(threads)  # touches pages, wakes threads
    ratios: list[float] = []
    for _ in range(_TURNS):  # in turns: hosts are faster and slower for seconds on end
        alone = launch()
        with updating(arrays, threads):
            ratios.append(launch() / alone)
    return max(1.0, statistics.median(ratios))
