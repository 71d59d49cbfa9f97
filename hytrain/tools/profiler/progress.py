"""How far a measurement is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO


class Progress(Protocol):
    """What is told about the work."""

    def show(self, share: float, words: str) -> None:
        """So much of all work, in [0, 1], is done; what comes next."""
        ...

    def close(self) -> None:
        """The work is over."""
        ...


class NoProgress:
    """Tells nobody: for ranks but the first, and for callers in Python."""

    def show(self, share: float, words: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Bar:
    def __init__(self, stream: TextIO) -> None:
        # DeepSpeed depends on it; imported here, since only a terminal needs it.
        from tqdm import tqdm

        self._bar: Any = tqdm(
            total=100, file=stream, bar_format="{l_bar}{bar}| {elapsed}<{remaining}"
        )

    def show(self, share: float, words: str) -> None:
        self._bar.n = max(self._bar.n, min(100, round(100 * share)))
        self._bar.set_description_str(words)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.n = 100
        self._bar.refresh()
        self._bar.close()


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin = time.monotonic()
        self._words = ""

    def show(self, share: float, words: str) -> None:
        if words != self._words:
            self._words = words
            seconds = time.monotonic() - self._begin
            print(f"[{share:4.0%} {seconds:5.1f} s] {words}", file=self._stream, flush=True)

    def close(self) -> None:
        self.show(1.0, "done")


def progress_on(stream: TextIO | None = None) -> Progress:
    """A bar where the stream (None: stderr) is a terminal, lines where it is not."""
    out = sys.stderr if stream is None else stream
    return _Bar(out) if out.isatty() else _Lines(out)
