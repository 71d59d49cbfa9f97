"""What launch-bound steps are placed by: all layers that fit go to the GPU, and mostly stay there.

The GPU waits for the host to launch its kernels then. It has time for the updates, while updates on
the CPU take cores and memory bandwidth from the launching thread, by an amount that no step at
another placement shows. What can be won by fewer GPU layers is at most what the GPU's own update
takes; what such steps scatter by, as the host is now faster and now slower, is more. So the few
steps that a solver would compare decide nothing: a placement that was measured before must have
been much faster for all that fits to be left again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hytrain.placement.measured_steps import WINDOW, MeasuredSteps
from hytrain.placement.memory import Bounds
from hytrain.placement.prediction import Candidate

_MOST_TRIAL_COST = 1.25
"""All that fits is not tried where it is predicted to take so much longer than here."""
_FAR_WORSE = 1.25
"""Ratio to another measured placement from which on a few steps are enough to leave again."""
_LEAST_LOSS, _MOST_LOSS = 0.04, 0.1
"""What must be lost by it, as a share, once as many steps as are kept say so: by their scatter."""
_DEVIATIONS = 1.5
"""Times a step's deviation is what the host's speed may have changed by between two placements."""
_FEW_STEPS = 9
_LEAST_GROWTH = 0.1
"""Share of the layers that must fit besides for them to be moved too."""


class LaunchBoundPlacement:
    """Keeps all that fits on the GPU until it has proved worse for the workload at hand."""

    def __init__(self) -> None:
        self._is_refuted = False
        self._went_to: int | None = None
        self._compared_with: int | None = None

    def restart(self) -> None:
        """The workload is another one."""
        self._is_refuted = False
        self._went_to = None
        self._compared_with = None

    def choose(
        self,
        here: int,
        allowed: Bounds,
        measured: MeasuredSteps,
        predictions: Sequence[Candidate],
        solved: int,
    ) -> int | None:
        """The number of GPU layers; None: the solver's choice holds.

        Args:
            here: GPU layers now.
            allowed: what fits.
            measured: steps of this workload.
            predictions: of steps with 0..L GPU layers.
            solved: the number that the solver would choose. It is measured first, where nothing but
                the present number has been: it is what all that fits is then compared with.
        """
        most = allowed.max_gpu_layers
        if self._is_refuted or most == 0:
            return None
        if here == self._went_to and allowed.allow(here) and not self._is_more(here, allowed):
            most = here
        if measured.seconds(most) is None:
            return self._first_visit(here, most, allowed, measured, predictions, solved)
        others = [number for number in measured.known if number != most]
        if not others:
            return None  # training began there: the solver has not been asked yet
        if here != most and measured.count(here) < _FEW_STEPS:
            return here
        self._is_refuted = any(self._is_worse(most, other, measured) for other in others)
        return None if self._is_refuted else most

    def _first_visit(
        self,
        here: int,
        most: int,
        allowed: Bounds,
        measured: MeasuredSteps,
        predictions: Sequence[Candidate],
        solved: int,
    ) -> int | None:
        """The way to all that fits, by way of what it is compared with."""
        if here == most:
            return here
        here_seconds, seconds = (predictions[k].step_seconds for k in (here, most))
        if seconds > _MOST_TRIAL_COST * here_seconds:
            return None
        if self._compared_with is None or not allowed.allow(self._compared_with):
            self._compared_with = solved
        other = self._compared_with
        if other != most and measured.count(other) < _FEW_STEPS:
            return other
        self._went_to = most
        return most

    @staticmethod
    def _is_more(here: int, allowed: Bounds) -> bool:
        """Whether so much more fits than here that it is no mere wavering of free memory."""
        fits, layers = allowed.max_gpu_layers, allowed.num_layers
        least = 1 if fits == layers else max(2, math.ceil(_LEAST_GROWTH * layers))
        return fits - here >= least

    @staticmethod
    def _is_worse(most: int, other: int, measured: MeasuredSteps) -> bool:
        """Whether all that fits has been measured to be much slower than another placement."""
        seconds, mine = measured.seconds(most), measured.seconds(other)
        if seconds is None or mine is None or measured.count(most) < _FEW_STEPS:
            return False
        ratio = _FAR_WORSE
        if measured.count(most) >= WINDOW:
            scatter = _DEVIATIONS * max(measured.scatter(most), measured.scatter(other))
            ratio = 1.0 + min(max(scatter, _LEAST_LOSS), _MOST_LOSS)
        return seconds > ratio * mine
