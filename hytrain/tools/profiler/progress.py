"""How far a measurement is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, TextIO

from tqdm import tqdm  # DeepSpeed depends on it


class Progress:
    """What is told about the work."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """
        Args:
            stream: where it is shown; None: nowhere, for ranks but the first, and for callers in
                Python.
        """
        is_terminal = stream is not None and stream.isatty()
        self._lines = None if is_terminal else stream
        self._bar: Any = tqdm(
            total=100,
            file=stream,
            bar_format="{l_bar}{bar}| {elapsed}<{remaining}",
            disable=not is_terminal,
        )
        self._begin = time.monotonic()
        self._words = ""

    def show(self, share: float, words: str) -> None:
        """So much of all work, in [0, 1], is done; what comes next."""
        if self._lines is not None and words != self._words:
            seconds = time.monotonic() - self._begin
            print(f"[{share:4.0%} {seconds:5.1f} s] {words}", file=self._lines, flush=True)
        self._words = words
        self._bar.n = max(self._bar.n, min(100, round(100 * share)))
        self._bar.set_description_str(words)

    def close(self) -> None:
        """The work is over."""
        if self._lines is not None:
            self.show(1.0, "done")
        self._bar.n = 100
        self._bar.refresh()
        self._bar.close()
