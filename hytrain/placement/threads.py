"""How many threads update on the CPU: calibrated on the kernel alone, then tried on real steps.

The kernel alone is fastest with nearly all cores. In a step it shares them with the threads that
launch kernels, run Python and feed copies, and memory with those copies; how much they take from
each other is measured by no other number than the step's. So once the placement has settled, the
counts next to the calibrated one are compared with it on real steps, in turns. All ranks of a job
make the same visits in the same steps and judge by the slowest, so they agree without a word about
counts: ranks of a host keep counts that were tried beside each other.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

from hytrain.placement.launch_bound import VISIT_STEPS, PairedTrial

logger = logging.getLogger(__name__)

FIRST_QUESTION = 64
"""Steps to the first question whether all ranks are ready, and to each other one as many as before
it: as a rule a placement has settled by then, whose moves would be taken for the threads'."""


class ThreadTrials:
    """Which count to use for the next visit, until it is settled."""

    def __init__(self, counts: Sequence[int], start: int) -> None:
        """``counts``: threads that may be used, rising; ``start``: the one of them that was
        calibrated.
        """
        self.counts = list(counts)
        self.position = self.counts.index(start)
        """Of the best count so far."""
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
        """The count for the steps that come now."""
        is_other = not self.settled and self._trial.is_at_other
        return self.counts[self.position + self._direction] if is_other else self.chosen

    def forget_visits(self) -> None:
        """The comparison at hand begins anew."""
        self._trial = PairedTrial()

    def add_visit(self, seconds: float) -> None:
        """A visit is over.

        ``seconds``: of its steps, the median; the largest of all ranks'.
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
    """Told of every step's end; sets the threads of the next ones, on all ranks at once."""

    def __init__(
        self,
        trials: ThreadTrials,
        use: Callable[[int], None],
        agree: Callable[[Sequence[int]], list[int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``use``: sets the threads of the chunks that come. ``agree``: the largest of each number
        over the ranks; a collective that waits. It is called in the same steps on all of them.
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
        """Steps are made for comparison: their times are not those of the placement at hand."""
        self.is_over = False

    def end_step(self, *, ready: bool) -> bool:
        """A step is final, on every rank; maybe a collective.

        ``ready``: this rank's placement has settled, and it has updates on the CPU.

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
        """Begins where all ranks are ready, and have as many counts to try."""
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
            # Layers have moved: what was seen is not the threads' doing. Later, from the beginning.
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
