"""Tells the user when the GPU's allocator works against the steps.

If no cached block fits and the driver has no more, torch's allocator waits for the device, gives
everything back that it had cached, and asks again: a retry. It costs tens of milliseconds, and a
job whose blocks do not fit into each other's gaps pays that in every step, silently.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

import torch

from hytrain.placement.memory_probe import LOOK_EVERY

logger = logging.getLogger(__name__)

_TIGHT = 0.9
"""Planned share of a GPU's memory beyond which gaps between blocks may exhaust it: an H200 with
22.4 GiB, 21.4 of them planned, failed at 18.7 allocated and 3.5 in gaps, under ZeRO-3; one with 24
GiB, filled by the solver, at 19.0 and 4.5."""


def retries_of(device: torch.device) -> Callable[[], int] | None:
    """How often the device's allocator has retried so far; None without a GPU."""
    if device.type != "cuda":
        return None
    return lambda: int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def advise_on_gaps(
    planned: float,
    limit: float,
    before: float = 0.0,
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Warns if a GPU's memory is to be filled, and torch's allocator leaves gaps there.

    Args:
        planned: bytes that a plan, or a number of GPU layers, takes at most.
        limit: bytes that this process may use.
        before: bytes planned until now: if they filled the memory too, there is no new warning.
        environment: the process's variables, the only place to read the allocator's settings.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = ",".join(environment.get(name, "") for name in names)
    if not before <= _TIGHT * limit < planned or "expandable_segments:True" in settings:
        return
    logger.warning(
        "%.0f%% of the %.1f GiB of this GPU are planned for, and gaps between memory blocks take "
        "some, too: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which leaves none, or "
        'keep more free ("hytrain.solver.gpu_memory_reserve_bytes"; --gpu-memory-reserve of plans)',
        100.0 * planned / limit,
        limit / 2**30,
    )


class AllocatorWatch:
    """Warns once, when there were retries in two successive intervals between looks.

    Layers that move, and sequences that become longer, may cost a retry each, which is harmless.
    """

    def __init__(self, retries: Callable[[], int] | None) -> None:
        """``retries``: counts them; None: there is nothing to watch."""
        self._retries = retries
        self._known: int | None = None
        self._before = 0

    def after_step(self, step: int) -> None:
        """To be called after every step, with its number."""
        if self._retries is None or step % LOOK_EVERY != 0:
            return
        now = self._retries()
        # The user may have reset the allocator's statistics.
        grown = 0 if self._known is None else max(0, now - self._known)
        self._known = now
        if grown and self._before:
            logger.warning(
                "the GPU's allocator gave cached memory back and took it anew %d times in the last "
                "%d steps: each time the GPU stands still. Set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or let more memory stay free: a "
                'larger "hytrain.solver.gpu_memory_reserve_bytes", or a smaller micro-batch or '
                "gpu_fraction",
                grown + self._before,
                2 * LOOK_EVERY,
            )
            self._retries = None
        self._before = grown
