"""How far a measurement is: a line for each part of it."""

from __future__ import annotations

import time
from typing import TextIO


class Progress:
    """What is told about the work."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """On a stream; None: nowhere, for ranks but the first, and for callers in Python."""
        self._stream = stream
        self._begin = time.monotonic()
        self._words = ""

    def show(self, share: float, words: str) -> None:
        """So much of all work, in [0, 1], is done; what comes next."""
        if self._stream is not None and words != self._words:
            seconds = time.monotonic() - self._begin
            print(f"[{share:4.0%} {seconds:5.1f} s] {words}", file=self._stream, flush=True)
        self._words = words
