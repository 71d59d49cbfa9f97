"""How many numbers of GPU layers are tried for one launch-bound workload.

Predictions of launch-bound steps differ by less than they err, so that the solver would try one
number after the other. A few are tried, soon; then the best of the measured ones is kept.
"""

from __future__ import annotations

from hytrain.placement.costs import StepCosts
from hytrain.placement.memory import Bounds

_TRIALS = 4
"""Numbers that are tried for one workload."""
_TRIAL_STEPS = 60
"""Steps of one workload in which they are tried."""
_OTHER_WORKLOAD = 1.5
"""Ratio by which compute or the CPU's work must change at a placement to be another workload."""


class Trials:
    """What is left to be tried for the workload at hand."""

    def __init__(self) -> None:
        self._used = 0
        self._since: int | None = None

    def restart(self) -> None:
        """The workload is another one; its first step is the next one seen."""
        self._used, self._since = 0, None

    def see(self, step: int) -> None:
        """A decision is considered at this step."""
        if self._since is None:
            self._since = step

    def use(self) -> None:
        """A number that has not been measured is moved to."""
        self._used += 1

    def are_left(self, step: int) -> bool:
        """Whether another number may be tried at this step."""
        since = step if self._since is None else self._since
        return self._used < _TRIALS and step - since < _TRIAL_STEPS


def is_other_workload(old: tuple[StepCosts, Bounds], new: tuple[StepCosts, Bounds]) -> bool:
    """Whether costs at one placement, or what fits, differ much from what was solved with.

    Args:
        old: costs and bounds of the last solve.
        new: as they are now, at the same number of GPU layers.
    """
    (before, fitted), (now, fits) = old, new
    grown = max(
        fits.max_gpu_layers - fitted.max_gpu_layers, fitted.min_gpu_layers - fits.min_gpu_layers
    )
    pairs = (
        (before.compute_seconds, now.compute_seconds),
        (before.cpu_seconds, now.cpu_seconds),
    )
    changed = any(max(pair) > _OTHER_WORKLOAD * min(pair) for pair in pairs)
    return changed or grown >= fits.notable_layers
