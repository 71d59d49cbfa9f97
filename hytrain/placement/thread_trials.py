"""How many threads update on the CPU: calibrated on the kernel alone, then tried on real steps.

The kernel alone is fastest with nearly all cores. In a step it shares them with the threads that
launch kernels, run Python and feed copies, and memory with those copies; how much they take from
each other is measured by no other number than the step's. So once the placement has settled, the
counts next to the calibrated one are tried.

Steps of one machine differ by 10 to 30 % within a minute, so that only what is measured in turns is
compared: another count, this one, and both again if the other seemed faster. All ranks of a job
make the same visits in the same steps and judge by the slowest, so they agree without a word about
counts: ranks of a host keep counts that were tried beside each other.
"""

from __future__ import annotations

from collections.abc import Sequence

VISIT_STEPS = 8
"""Steps at one count before the next; the first ones of them are left out (:data:`LEFT_OUT`)."""
LEFT_OUT = 2
_LEAST_GAIN = 0.96
"""Ratio of the steps below which another count is faster by more than noise, twice."""
_COMPARISONS = 3
"""Of two counts, for one workload."""


class ThreadTrials:
    """Which count to use for the next visit, until it is settled."""

    def __init__(self, counts: Sequence[int], start: int) -> None:
        """
        Args:
            counts: threads that may be used, rising.
            start: the one of them that was calibrated.
        """
        self._counts = list(counts)
        self._here = self._counts.index(start)
        self._direction = -1 if self._here > 0 else 1  # fewer first: the calibration has cores
        self._has_won = False
        self._comparisons = 0
        self._visits: list[float] = []
        """Seconds in the comparison at hand: the other count, this one, the other, this one."""
        self.settled = len(self._counts) == 1

    @property
    def chosen(self) -> int:
        """The best count so far."""
        return self._counts[self._here]

    @property
    def number_of_counts(self) -> int:
        """How many may be used."""
        return len(self._counts)

    @property
    def position(self) -> int:
        """Of the best one so far among them."""
        return self._here

    def forget_visits(self) -> None:
        """The comparison at hand begins anew."""
        self._visits.clear()

    @property
    def visiting(self) -> int:
        """The count for the steps that come now."""
        is_other = not self.settled and len(self._visits) % 2 == 0
        return self._counts[self._here + self._direction] if is_other else self.chosen

    def add_visit(self, seconds: float) -> None:
        """A visit is over.

        Args:
            seconds: of its steps, the median; the largest of all ranks'.
        """
        if self.settled:
            return
        visits = self._visits
        visits.append(seconds)
        if len(visits) % 2:
            return
        is_faster = visits[-2] < _LEAST_GAIN * visits[-1]
        if is_faster and len(visits) == 2:
            return  # once more: it may have been the host
        visits.clear()
        self._end_comparison(is_faster=is_faster)

    def _end_comparison(self, *, is_faster: bool) -> None:
        self._comparisons += 1
        if is_faster:
            self._here += self._direction
            self._has_won = True
        elif self._has_won or self._comparisons > 1:
            self.settled = True  # what lies on the other side has been tried
            return
        else:
            self._direction = -self._direction
        has_next = 0 <= self._here + self._direction < len(self._counts)
        self.settled = not has_next or self._comparisons >= _COMPARISONS
