"""Two ways to run a step, measured in turns.

Steps of one machine differ by 10 to 30 % within a minute: only what is measured next to each other
is compared, and what seems better has to be so twice.
"""

from __future__ import annotations

VISIT_STEPS = 8
"""Steps of one way before the next: a visit to a bad one costs little, its median holds."""
LEAST_GAIN = 0.04
"""Share of the step that the other way must win in both comparisons: twice by more than noise."""


class PairedTrial:
    """The other way, the present one, and both again if the other seemed faster."""

    def __init__(self) -> None:
        self._visits: list[float] = []

    @property
    def is_at_other(self) -> bool:
        """Whether the next visit is to the other way."""
        return len(self._visits) % 2 == 0

    def add_visit(self, seconds: float) -> bool | None:
        """A visit is over, whose median step took so long.

        Returns:
            whether the other way is faster; None while that is open.
        """
        self._visits.append(seconds)
        if self.is_at_other:
            other, present = self._visits[-2:]
            if other > (1.0 - LEAST_GAIN) * present:
                return False
            if len(self._visits) == 4:
                return True
        return None
