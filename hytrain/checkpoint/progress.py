"""Progress of long reads and writes of checkpoints: a line every few seconds."""

from __future__ import annotations

import logging
import threading
import time

from hytrain.errors import size_text

_SECONDS = 5.0

logger = logging.getLogger("hytrain.run")


class Progress:
    """Progress of one pass over many bytes; threads may add to it."""

    def __init__(self, words: str, num_bytes: int, rank: int = 0) -> None:
        """``words`` say what is done, to ``num_bytes`` in all; only rank 0 logs."""
        self._words, self._total, self._is_told = words, num_bytes, rank == 0
        self._done, self._lock = 0, threading.Lock()
        self._next = time.monotonic() + _SECONDS

    def add(self, num_bytes: int) -> None:
        """Counts ``num_bytes`` more as done; logs a line if the last one is some seconds old."""
        with self._lock:
            self._done += num_bytes
            if self._is_told and time.monotonic() >= self._next:
                self._next = time.monotonic() + _SECONDS
                done, total = size_text(self._done), size_text(self._total)
                logger.info("%s: %s of %s", self._words, done, total)
