"""Python's full garbage collections: in the same step on all ranks, while the GPU is still busy.

One takes .3 to .5 s beside torch, DeepSpeed and transformers, in which the thread that launches
kernels stands still. Python begins it anywhere in a step and on each rank in another step, and each
time the GPUs of all ranks wait. Here all ranks make it after the launch of backward, when the GPU
still has the most to do.
"""

from __future__ import annotations

import gc

from hytrain.comm.collectives import ShardCollectives

SETTLED = 4
"""Steps before the counted ones: the first allocate more than later ones do."""
COUNTED = 8
"""Steps whose collections of the middle generation are counted."""
EACH = 50
"""Collections of the middle generation to a full one. Python's own rule (one when a quarter of all
objects are new) gives some 40 with 32 blocks and checkpointing."""


class FullCollections:
    """Makes full collections every so many steps, as many on every rank.

    They follow allocations as Python's own do, so small models have few. Python's own stay allowed
    for the time without steps, after twice as many allocations. With ``gc.disable()`` there are
    none.
    """

    def __init__(self, collectives: ShardCollectives) -> None:
        self._collectives = collectives
        self._steps = 0
        self._counted_from = 0
        self._every: int | None = None
        """Steps to a full collection; None before it is known, and if no step needs any."""
        self._python_own: tuple[int, int, int] | None = None
        """Python's thresholds before they were set here."""

    def backward_launched(self) -> None:
        """Collects if the step is one for it; called once in each step, by all ranks."""
        self._steps += 1
        if self._every is not None:
            if self._steps % self._every == 0 and gc.isenabled():
                gc.collect()
        elif self._steps == SETTLED:
            self._counted_from = _middle_collections()
        elif self._steps == SETTLED + COUNTED:
            self._agree(_middle_collections() - self._counted_from)

    def _agree(self, counted: int) -> None:
        counted = self._collectives.maximum([counted], "the agreement on garbage collections")[0]
        young, middle, old = gc.get_threshold()
        if counted == 0 or old == 0:  # 0 with the incremental collector of Python 3.14.0 to 3.14.4
            return
        self._every = max(1, EACH * COUNTED // counted)
        self._python_own = (young, middle, old)
        gc.set_threshold(young, middle, max(old, 2 * EACH))

    def close(self) -> None:
        """Gives Python its thresholds back, unless the user has set others."""
        if self._python_own is not None:
            young, middle, old = self._python_own
            if gc.get_threshold() == (young, middle, max(old, 2 * EACH)):
                gc.set_threshold(young, middle, old)
            self._python_own = None


def _middle_collections() -> int:
    return gc.get_stats()[1]["collections"]
