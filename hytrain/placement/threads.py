"""How many threads update on the CPU: calibrated on the kernel alone, then tried on real steps.

The kernel alone is fastest with nearly all cores. In a step it shares them with the threads that
launch kernels, run Python and feed copies, and memory with those copies; how much they take from
each other shows only in the step's time. So once the placement has settled, the counts next to the
calibrated one are compared with it on real steps, in turns. All ranks of a job make the same visits
in the same steps and judge by the slowest, so they agree without exchanging counts: ranks of a host
keep counts that were tried beside each other.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

from hytrain.placement.launch_bound import VISIT_STEPS, PairedTrial

logger = logging.getLogger(__name__)

FIRST_QUESTION = 64
"""Steps until ranks first ask whether all are ready; each later question comes at twice as many. As
a rule a placement has settled by then: effects of moves would be taken for those of threads."""


class ThreadTrials:
    """Chooses the count of threads for each visit, until one is settled on."""

    def __init__(self, counts: Sequence[int], start: int) -> None:
        """``counts``: threads that may be used, in ascending order; ``start``: the one of them that
        was calibrated.
        """
        self.counts = list(counts)
        self.position = self.counts.index(start)
        """The place of the best count so far."""
        self._direction = -1 if self.position > 0 else 1  # fewer first: the calibration has cores
        self._may_turn_round = 0 < self.position < len(self.counts) - 1
        self._trial = PairedTrial()
        self.settled = len(self.counts) == 1

    @property
    def chosen(self) -> int:
        """The best count so far."""
        return self.counts[self.position]

    @property
    def visiting(self) -> int:
        """The count for the next steps."""
        is_other = not self.settled and self._trial.is_at_other
        return self.counts[self.position + self._direction] if is_other else self.chosen

    def forget_visits(self) -> None:
        """Restarts the present comparison."""
        self._trial = PairedTrial()

    def add_visit(self, seconds: float) -> None:
        """Adds a visit that is over.

        ``seconds``: the median of its steps, the largest of all ranks'.
        """
        is_faster = None if self.settled else self._trial.add_visit(seconds)
        if is_faster is None:
            return
        self._trial = PairedTrial()
        if is_faster:
            self.position += self._direction
        elif self._may_turn_round:
            self._direction = -self._direction
        else:
            self.settled = True
        self._may_turn_round = False  # what lies on the other side is known from here on
        self.settled |= not 0 <= self.position + self._direction < len(self.counts)


class TunedThreads:
    """Sets the threads of the next steps at the end of each step, on all ranks at once."""

    def __init__(
        self,
        trials: ThreadTrials,
        use: Callable[[int], None],
        agree: Callable[[Sequence[int]], list[int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``use``: sets the threads of coming chunks. ``agree``: returns the largest of each number
        over the ranks: a collective that waits, called in the same steps on all of them.
        """
        self.trials = trials
        self._use = use
        self._agree = agree
        self._clock = clock
        self._first = trials.chosen
        self._last = clock()
        self._steps = 0
        self._next_question = FIRST_QUESTION
        self._seen: list[float] = []
        self.is_trying = False
        """Whether steps are made for comparison: their times are not the present placement's."""
        self.is_over = False

    def end_step(self, *, ready: bool) -> bool:
        """Ends a step that is final on every rank; in some steps this is a collective.

        ``ready``: whether this rank's placement has settled and it has updates on the CPU.

        Returns:
            Whether another number of threads than the calibrated one was just settled on.
        """
        now = self._clock()
        seconds, self._last = now - self._last, now
        self._steps += 1
        if self.is_over:
            return False
        if not self.is_trying:
            if self._steps >= self._next_question:
                self._next_question = 2 * self._steps
                self._ask(ready=ready)
            return False
        self._seen.append(seconds)
        return len(self._seen) == VISIT_STEPS and self._end_visit(ready=ready)

    def end(self) -> None:
        """Keeps what has been chosen so far; to be called on all ranks in the same step."""
        self._use(self.trials.chosen)
        self.is_trying, self.is_over = False, True

    def _ask(self, *, ready: bool) -> None:
        """Begins to try counts, if all ranks are ready.

        If ranks differ in how many counts they have, or in the place of the calibrated one, none
        is ever tried.
        """
        here = [len(self.trials.counts), self.trials.position]
        unready, *found = self._agree([int(not ready), *here, *(-value for value in here)])
        same = found[:2] == [-value for value in found[2:]]
        if self.trials.settled or not same:
            self.is_over = True
        elif not unready:
            self.is_trying = True
            self._visit()

    def _end_visit(self, *, ready: bool) -> bool:
        median = statistics.median(self._seen)
        unready, microseconds = self._agree([int(not ready), round(median * 1e6)])
        if unready:
            # Layers have moved: the times do not tell of the threads. They are tried anew later.
            self.trials.forget_visits()
            self.is_trying = False
            self._use(self.trials.chosen)
            return False
        self.trials.add_visit(microseconds / 1e6)
        if not self.trials.settled:
            self._visit()
            return False
        self.end()
        changed = self.trials.chosen != self._first
        if changed:
            logger.info(
                "%d threads update on the CPU, in place of %d: steps are shorter with them",
                self.trials.chosen,
                self._first,
            )
        return changed

    def _visit(self) -> None:
        self._seen.clear()
        self._use(self.trials.visiting)
