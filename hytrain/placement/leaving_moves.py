"""How often layers may leave the GPU for little: its memory, or a slightly shorter step.

Where the host is shared, what kept the CPU busy comes back: then steps are much too long until the
layers are on the GPU again. So a move off the GPU that had to be undone is a reason to wait, each
time twice as long, before the next one.
"""

from __future__ import annotations

_FIRST_PAUSE = 100
"""Steps without such a move after the first one that was undone."""
_LONGEST_PAUSE = 1600


class LeavingMoves:
    """Whether layers may leave the GPU for a small gain, from the moves so far."""

    def __init__(self) -> None:
        self._pause = _FIRST_PAUSE
        self._has_left = False
        self._allowed_from = 0

    def are_allowed(self, step: int) -> bool:
        """Whether layers may leave the GPU at this step for a small gain."""
        return step >= self._allowed_from

    def see_move(self, step: int, before: int, after: int) -> None:
        """A move was decided at this step, from so many GPU layers to so many."""
        if after < before:
            self._has_left = True
        elif after > before and self._has_left:
            self._has_left = False
            self._allowed_from = step + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
