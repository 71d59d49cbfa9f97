"""Tries numbers of update threads on the real steps, on all ranks at once."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence

from hytrain.placement.thread_trials import LEFT_OUT, VISIT_STEPS, ThreadTrials

logger = logging.getLogger(__name__)

_FROM_STEP = 64
"""Before it the placement is being solved, whose moves would be taken for the threads'."""
_ASK_EVERY = 16
"""Steps between two questions whether all ranks are ready."""
_QUESTIONS = 16
"""After so many the calibrated count stays: this training does not come to rest."""


class TunedThreads:
    """Told of every step's end; sets the threads of the next ones."""

    def __init__(
        self,
        trials: ThreadTrials,
        use: Callable[[int], None],
        agree: Callable[[Sequence[int]], list[int]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            trials: decides.
            use: sets the threads of the chunks that come.
            agree: the largest of each number over the ranks; a collective that waits. It is called
                in the same steps on all of them.
            clock: seconds.
        """
        self.trials = trials
        self._use = use
        self._agree = agree
        self._clock = clock
        self._first = trials.chosen
        self._last = clock()
        self._steps = 0
        self._questions = 0
        self._seen: list[float] = []
        self.is_trying = False
        """Steps are made for comparison: their times are not those of the placement at hand."""
        self.is_over = False

    def end_step(self, *, ready: bool) -> bool:
        """A step is final, on every rank; maybe a collective.

        Args:
            ready: this rank's placement has settled, and it has updates on the CPU.

        Returns:
            Whether another number of threads than the calibrated one was just settled on.
        """
        now = self._clock()
        seconds, self._last = now - self._last, now
        self._steps += 1
        if self.is_over:
            return False
        if not self.is_trying:
            if self._steps >= _FROM_STEP and self._steps % _ASK_EVERY == 0:
                self._ask(ready=ready)
            return False
        self._seen.append(seconds)
        if len(self._seen) < VISIT_STEPS:
            return False
        return self._end_visit(ready=ready)

    def end(self) -> None:
        """Keeps what has been chosen so far; to be called on all ranks in the same step."""
        self._use(self.trials.chosen)
        self.is_trying, self.is_over = False, True

    def _ask(self, *, ready: bool) -> None:
        """Begins where all ranks are ready, and have as many counts to try."""
        here = [self.trials.number_of_counts, self.trials.position]
        unready, *found = self._agree([int(not ready), *here, *(-value for value in here)])
        same = found[:2] == [-value for value in found[2:]]
        self._questions += 1
        if self.trials.settled or not same or self._questions > _QUESTIONS:
            self.is_over = True
        elif not unready:
            self.is_trying = True
            self._visit()

    def _end_visit(self, *, ready: bool) -> bool:
        median = statistics.median(self._seen[LEFT_OUT:])
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
