"""How long a rank has waited for the others, and whether that is longer than usual."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

import torch

PATIENCE_SECONDS = 5.0
"""How long a rank waits at least before it asks what the others are doing, or gives up on one that
has left a step in the middle and may come back."""
_USUAL = 32
"""Waits that tell how long one usually takes: a step's backward may be longer than patience."""


class Waits:
    """Those of one rank: the training thread makes them, the watching one asks for them.

    Without a lock: what both use is assigned at once, a float or None.
    """

    def __init__(self, mark: torch.cuda.Event | None) -> None:
        """``mark``: of the queue that collectives are issued to, where a device has one."""
        self._mark = mark
        self._marked_at: float | None = None
        self._since: float | None = None
        self._usual: deque[float] = deque(maxlen=_USUAL)

    @contextmanager
    def on_host(self) -> Generator[None]:
        """The host waits while it lasts."""
        begin = self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
        self._usual.append(time.monotonic() - begin)

    def queued(self) -> None:
        """A collective has been issued, and the host goes on: the device may wait."""
        if self._mark is not None:
            self._mark.record()
            self._marked_at = time.monotonic()

    @property
    def patience(self) -> float:
        """Seconds of a wait that is not long yet."""
        return max(PATIENCE_SECONDS, 3.0 * max(self._usual, default=0.0))

    def late_since(self, now: float) -> float | None:
        """Since when this rank, or its device, has waited, where that is longer than patience."""
        since, patience = self._since, self.patience
        if since is not None:
            return since if now - since > patience else None
        if self._mark is None or self._marked_at is None or now - self._marked_at <= patience:
            return None
        # The host has gone on; that the device has not is seen at what was queued last.
        try:
            return None if self._mark.query() else self._marked_at
        except RuntimeError:  # a broken device is reported by the code that uses it
            return None
