"""Leaves alone what has failed, for twice as long each time."""

from __future__ import annotations

FIRST_PAUSE = 100
"""Steps: seconds to minutes, in which another process's load may end or its memory be freed."""
_LONGEST_PAUSE = 1600
"""Steps: what is tried this seldom costs nothing."""


class Backoff:
    """When to try again."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE
        self._until = 0

    def fail(self, step: int) -> int:
        """Notes a failure at this step; returns the step from which on it may be tried again."""
        self._until = step + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return self._until

    def is_over(self, step: int) -> bool:
        """Whether it may be tried at this step."""
        return step >= self._until
