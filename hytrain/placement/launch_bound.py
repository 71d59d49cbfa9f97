"""Placement of launch-bound steps: all layers that fit go to the GPU, unless that proves worse.

The GPU waits for the host to launch its kernels then. It has time for the updates, while updates on
the CPU take cores and memory bandwidth from the launching thread, by an amount that no step at
another placement shows. What can be won by fewer GPU layers is at most what the GPU's own update
takes; such steps scatter by more, since the host is now faster and now slower for seconds on end.

So steps of different times are not compared. Where training comes to a launch-bound workload, all
that fits is measured right behind the number that the solver would choose. Where it is slower, both
are measured once more, in turns, and again if it is slower by more than updates and their launches
may take: that is the host. Where it is not, and that did not take a third visit, the number
halfway between both is measured against it in the same way, if enough can be won: many cores may
hide a part of the updates, where nothing is clipped.
Then it is settled, until steps are not launch-bound any more; hosts drift by so much that a change
of times alone says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

from hytrain.placement.memory import Bounds
from hytrain.placement.prediction import Candidate

_MOST_TRIAL_COST = 1.25
"""What is predicted to take so much longer than the other is not measured."""
_STEPS = 8
"""Of each visit to one of the numbers."""
_FEW = 4
"""Steps after which a visit ends where nothing is to be won."""
_LEAST_BETWEEN = 4
"""Layers from the solver's choice to all that fit, for the number halfway to be worth a visit."""
_LEAST_LOSS = 1.03
"""Ratio of the two's steps from which on all that fits is worse."""
_DOUBTFUL_LOSS = 1.015
"""The same from which on one visit to each does not tell: both are visited once more."""
_CLEAR_LOSS = 1.1
"""The same that one visit to each shows, where updates may take so much."""
_MOST_OF_UPDATES = 1.5
"""Loss that updates may come to, as a multiple of what they take with the GPU to themselves."""
_MOST_OF_LAUNCHES = 0.1
"""The same that their launches may come to, of a step: 0.02 to 0.03 where layers share them."""
_VISITS = 3
"""To both numbers together, before all that fits is given up for less."""
_MORE_VISITS = 4
"""The same where it loses more than updates and their launches may come to."""


class LaunchBoundPlacement:
    """Compares all that fits with fewer layers, for one workload."""

    def __init__(self) -> None:
        self._verdict: Literal["open", "kept", "worse"] = "open"
        self._went_to: int | None = None
        self._other: int | None = None
        self._middle: int | None = None
        self._beaten_by: int | None = None
        """Fewer layers than fit, which are better."""
        self._visits: list[tuple[int, list[float]]] = []

    def restart(self) -> None:
        """The workload is another one."""
        self._verdict, self._other = "open", None
        self._middle = self._beaten_by = None
        self._visits.clear()

    @property
    def is_settled(self) -> bool:
        """Nothing is being compared."""
        return self._verdict != "open"

    def see_change(self) -> None:
        """Times differ by so much that the workload may be another one."""
        if self._verdict == "worse":
            self.restart()  # the solver's choice for the one before

    def add_step(self, gpu_layers: int, seconds: float) -> None:
        """A step took so long at a settled placement."""
        if not self._visits or self._visits[-1][0] != gpu_layers:
            self._visits.append((gpu_layers, []))
        if len(self._visits[-1][1]) < _STEPS:
            self._visits[-1][1].append(seconds)

    def choose(
        self, here: int, allowed: Bounds, predictions: Sequence[Candidate], solved: int
    ) -> int | None:
        """The number of GPU layers; None: the solver's choice holds.

        Args:
            here: GPU layers now.
            allowed: what fits.
            predictions: of steps with 0..L GPU layers.
            solved: the number that the solver would choose.
        """
        most = allowed.max_gpu_layers
        if self._verdict == "worse" or most == 0:
            return None
        if here == self._went_to and allowed.allow(here) and not _is_more(here, allowed):
            most = here
        if self._verdict == "kept":
            fewer = self._beaten_by
            number = fewer if fewer is not None and allowed.allow(fewer) else most
        else:
            number = self._compare(here, most, predictions, solved)
        if number == most:
            self._went_to = most
        return number

    def _compare(
        self, here: int, most: int, predictions: Sequence[Candidate], solved: int
    ) -> int | None:
        """Where to measure next; settles it where all have been."""
        if self._other is None:
            self._other = here if solved == most else solved
        other = self._other
        steps = {k: predictions[k].step_seconds for k in (most, other)}
        if not self._visits_of(most) and steps[most] > _MOST_TRIAL_COST * steps[other]:
            return None
        if steps[other] <= _MOST_TRIAL_COST * steps[most]:
            number, loses = self._duel(here, most, other, _most_gain(predictions, most, other))
            if loses is None:
                return number
            if loses:
                self._verdict = "worse"
                return None
        # Two numbers between which it was in doubt leave little to be won between them.
        was_in_doubt = len(self._visits_of(most)) + len(self._visits_of(other)) >= _VISITS
        if self._middle is None and most - other >= _LEAST_BETWEEN and not was_in_doubt:
            middle = (most + other) // 2
            wins = _most_gain(predictions, most, middle) >= _LEAST_LOSS - 1.0
            if wins and predictions[middle].step_seconds <= _MOST_TRIAL_COST * steps[most]:
                self._middle = middle
        return self._compare_middle(here, most, predictions)

    def _compare_middle(self, here: int, most: int, predictions: Sequence[Candidate]) -> int:
        """As :meth:`_compare`, where all that fits has won, or the other is not worth a visit."""
        if self._middle is not None and not self._visits_of(most):
            return most
        if self._middle is not None and not self._is_slow(self._middle, most):
            gain = _most_gain(predictions, most, self._middle)
            number, loses = self._duel(here, most, self._middle, gain)
            if loses is None:
                return number
            self._beaten_by = self._middle if loses else None
        self._verdict = "kept"
        return most if self._beaten_by is None else self._beaten_by

    def _is_slow(self, number: int, other: int) -> bool:
        """Whether the first steps of a visit are no faster than the other number's."""
        last, steps = self._visits[-1]
        if last != number or not _FEW <= len(steps) < _STEPS or self._visits_of(number):
            return False
        return statistics.median(steps) >= _median_of_all(self._visits_of(other))

    def _duel(self, here: int, most: int, other: int, gain: float) -> tuple[int, bool | None]:
        """Two numbers, measured in turns.

        Args:
            here, most, other: GPU layers now, all that fit, and fewer.
            gain: see :func:`_most_gain`.

        Returns:
            Where to be next, and whether ``most`` has lost; None while that is open.
        """
        visits = {k: self._visits_of(k) for k in (most, other)}
        if here == most and self._is_slow_again(most, visits[most], visits[other]):
            return other, True
        if here in (most, other) and not self._is_complete(here):
            return here, None
        if not visits[other]:
            return other, None
        if not visits[most]:
            return most, None
        loss = _loss(visits[most], visits[other])
        by_updates = 1.0 + _MOST_OF_UPDATES * gain
        may_be = loss <= by_updates + _MOST_OF_LAUNCHES
        is_clear = loss <= _DOUBTFUL_LOSS or _CLEAR_LOSS <= loss <= by_updates
        enough = _VISITS if may_be else _MORE_VISITS
        if not is_clear and len(visits[most]) + len(visits[other]) < enough:
            # Once more, in turns: a host that became slower meanwhile slows both down.
            return (other if here == most else most), None
        is_worse = loss > _LEAST_LOSS
        return (other if is_worse else most), is_worse

    def _is_slow_again(
        self, most: int, visits: Sequence[list[float]], other: Sequence[list[float]]
    ) -> bool:
        """Whether a second visit begins as the first was: the rest of it would cost as much."""
        last, steps = self._visits[-1] if self._visits else (most, [])
        if last != most or not _FEW <= len(steps) < _STEPS or (len(visits), len(other)) != (1, 2):
            return False
        return _loss([steps, *visits], other) >= _CLEAR_LOSS

    def _is_complete(self, here: int) -> bool:
        """Whether the visit that goes on has lasted long enough."""
        last = self._visits[-1] if self._visits else (here, [])
        return last[0] == here and len(last[1]) == _STEPS

    def _visits_of(self, gpu_layers: int) -> list[list[float]]:
        """Steps of each visit to a number of layers that lasted long enough."""
        return [s for k, s in self._visits if k == gpu_layers and len(s) == _STEPS]


def _median_of_all(visits: Sequence[Sequence[float]]) -> float:
    return statistics.median([seconds for steps in visits for seconds in steps])


def _loss(most: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Ratio of the two's steps.

    Of all of them; where both were visited twice, of the faster visits: one during which the host
    was slower, by however much, does not decide then.
    """
    if min(len(most), len(other)) < 2:
        return _median_of_all(most) / _median_of_all(other)
    fastest = [min(statistics.median(steps) for steps in visits) for visits in (most, other)]
    return fastest[0] / fastest[1]


def _most_gain(predictions: Sequence[Candidate], most: int, other: int) -> float:
    """What fewer layers on the GPU can win, as a share of the step: what their update takes there.

    Args:
        predictions: of steps with 0..L GPU layers.
        most: layers on the GPU.
        other: fewer ones.
    """
    takes = predictions[most].gpu_update_seconds - predictions[other].gpu_update_seconds
    step = predictions[most].step_seconds
    return takes / step if step > 0.0 else 0.0


def _is_more(here: int, allowed: Bounds) -> bool:
    """Whether so much more fits than here that it is no mere wavering of free memory."""
    fits = allowed.max_gpu_layers
    return fits - here >= (1 if fits == allowed.num_layers else allowed.notable_layers)
