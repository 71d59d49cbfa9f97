"""How long something takes that all ranks of a host do at once.

They share its memory and its links, so a measurement begins at a barrier and lasts for a time, not
for a number of repeats: nobody's last repeats run undisturbed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from hytrain.tools.profiler.ranks import Ranks

_FEWEST_REPEATS = 3


def median_seconds(run: Callable[[], float], ranks: Ranks, seconds: float) -> float:
    """The median of what ``run`` returns, over some seconds of repeats on all ranks at once."""
    run()  # touches pages, wakes threads
    ranks.barrier()
    end = time.perf_counter() + seconds
    values = [run()]
    while len(values) < _FEWEST_REPEATS or time.perf_counter() < end:
        values.append(run())
    return statistics.median(values)
