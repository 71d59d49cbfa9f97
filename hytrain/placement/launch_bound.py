"""Placement of launch-bound steps: all layers that fit go to the GPU, unless that proves worse.

The GPU waits for the host to launch its kernels then. It has time for the updates, while updates on
the CPU take cores and memory bandwidth from the launching thread, by an amount that no step at
another placement shows. What can be won by fewer GPU layers is at most what the GPU's own update
takes; such steps scatter by more, since the host is now faster and now slower for seconds on end.

So steps of different times are not compared. Where training comes to a launch-bound workload, all
that fits is measured right behind the number that the solver would choose. Where it is slower, both
are measured once more, in turns, and then it is settled for this workload.
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
"""Of each visit to one of the two numbers."""
_LEAST_LOSS = 1.06
"""Ratio of the two's steps from which on all that fits is worse."""


class LaunchBoundPlacement:
    """Compares all that fits with the solver's choice, for one workload."""

    def __init__(self) -> None:
        self._verdict: Literal["open", "kept", "worse"] = "open"
        self._went_to: int | None = None
        self._other: int | None = None
        self._visits: list[tuple[int, list[float]]] = []

    def restart(self) -> None:
        """The workload is another one."""
        self._verdict, self._other = "open", None
        self._visits.clear()

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
        number = most if self._verdict == "kept" else self._compare(here, most, predictions, solved)
        if number == most:
            self._went_to = most
        return number

    def _compare(
        self, here: int, most: int, predictions: Sequence[Candidate], solved: int
    ) -> int | None:
        """Where to measure next; settles it where both have been."""
        if self._other is None:
            self._other = here if solved == most else solved
        other = self._other
        steps = {k: predictions[k].step_seconds for k in (most, other)}
        if not self._steps_of(most) and steps[most] > _MOST_TRIAL_COST * steps[other]:
            return None
        if other == most or steps[other] > _MOST_TRIAL_COST * steps[most]:
            self._verdict = "kept"
            return most
        if here in (most, other) and not self._is_complete(here):
            return here
        visits = {k: self._steps_of(k) for k in (most, other)}
        if not visits[other]:
            return other
        if not visits[most]:
            return most
        seconds = {k: statistics.median(found) for k, found in visits.items()}
        is_worse = seconds[most] > _LEAST_LOSS * seconds[other]
        if is_worse and len(visits[other]) < 2 * _STEPS:
            return other
        if is_worse and len(visits[most]) < 2 * _STEPS:
            return most
        self._verdict = "worse" if is_worse else "kept"
        return None if is_worse else most

    def _is_complete(self, here: int) -> bool:
        """Whether the visit that goes on has lasted long enough."""
        last = self._visits[-1] if self._visits else (here, [])
        return last[0] == here and len(last[1]) == _STEPS

    def _steps_of(self, gpu_layers: int) -> list[float]:
        """Steps of all visits to a number of layers that lasted long enough."""
        visits = [s for k, s in self._visits if k == gpu_layers and len(s) == _STEPS]
        return [seconds for steps in visits for seconds in steps]


def _is_more(here: int, allowed: Bounds) -> bool:
    """Whether so much more fits than here that it is no mere wavering of free memory."""
    fits = allowed.max_gpu_layers
    return fits - here >= (1 if fits == allowed.num_layers else allowed.notable_layers)
