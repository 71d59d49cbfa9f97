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
"""Recent waits that tell how long one usually takes: a step's backward may outlast the patience."""


class Waits:
    """One rank's waits: the training thread makes them, the watching thread asks about them.

    Without a lock: what both use, a float or None, is assigned in one go.
    """

    def __init__(self, mark: torch.cuda.Event | None) -> None:
        """``mark``: event to record behind collectives on the current stream; None: no device."""
        self._mark = mark
        self._marked_at: float | None = None
        self._since: float | None = None
        self._usual: deque[float] = deque(maxlen=_USUAL)

    @contextmanager
    def on_host(self) -> Generator[None]:
        """Declares that the host waits while the block runs."""
        begin = self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
        self._usual.append(time.monotonic() - begin)

    def queued(self) -> None:
        """Notes that a collective was issued and the host goes on: the device may wait."""
        if self._mark is not None:
            self._mark.record()
            self._marked_at = time.monotonic()

    @property
    def patience(self) -> float:
        """How many seconds a wait may take before it counts as long."""
        return max(PATIENCE_SECONDS, 3.0 * max(self._usual, default=0.0))

    def late_since(self, now: float) -> float | None:
        """Since when this rank or its device has waited; None if not longer than its patience."""
        since, patience = self._since, self.patience
        if since is not None:
            return since if now - since > patience else None
        if self._mark is None or self._marked_at is None or now - self._marked_at <= patience:
            return None
        # The host has gone on; what was queued last shows whether the device has.
        try:
            return None if self._mark.query() else self._marked_at
        except RuntimeError:  # a broken device is reported by the code that uses it
            return None
