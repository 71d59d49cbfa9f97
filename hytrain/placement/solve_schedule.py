"""Which steps are measured, and after which of them the controller decides anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hytrain.placement.controller import PlacementController
from hytrain.placement.costs import MemoryLimits
from hytrain.placement.measure import CONFIRMING, MANY_STEPS, CostEstimator
from hytrain.placement.memory_probe import LOOK_EVERY
from hytrain.placement.step_timer import StepSample

_MEASURE_EVERY = 4
"""One step in so many is measured once all is known. A mark on the compute stream costs
microseconds; a change is seen within as many steps and confirmed by the next ones."""
_OTHER_WORKLOAD = 1.75
"""Ratio of compute before and after a change from which the workload counts as another one: other
users of the host make steps longer by less, and temporarily."""


class SolveSchedule:
    """Counts a rank's steps, selects those to measure and has the controller decide.

    Attributes:
        steps: how many have been made.
        measured_since: steps since times or placement were last found to change.
    """

    def __init__(
        self,
        controller: PlacementController,
        estimator: CostEstimator,
        limits: Callable[[int], MemoryLimits],
    ) -> None:
        """``limits``: returns the memory that this rank may use at a step."""
        self._controller = controller
        self._estimator = estimator
        self._limits = limits
        self.steps = 0
        self.measured_since = 0
        self._considered_at = 0
        self._has_new_steps = False
        """Whether steps were measured since then."""
        self._firings = 0
        self._idle_steps = 0

    def resume(self, step: int) -> None:
        """Continues from a checkpoint: steps are counted from there."""
        self.steps = self._considered_at = step
        self.measured_since = 0

    def see_firings(self, num_firings: int) -> None:
        """Notes autograd's count of gradients so far: if a step adds none, the rank is idle."""
        self._idle_steps = self._idle_steps + 1 if num_firings == self._firings else 0
        self._firings = num_firings

    def add_samples(self, samples: Sequence[StepSample]) -> None:
        """Adds measured steps; if they differ from those before, the next are measured as well."""
        estimator, controller = self._estimator, self._controller
        self._has_new_steps = True
        ratio = estimator.add_samples(samples)
        if estimator.is_changing:
            # A step that something held up is no change: the next ones tell.
            self.measured_since = min(self.measured_since, MANY_STEPS - CONFIRMING + 1)
        elif ratio != 1.0:
            self.measured_since = 0
        if not 1.0 / _OTHER_WORKLOAD < ratio < _OTHER_WORKLOAD:
            controller.see_other_workload()
        if not controller.moves.is_settled:
            return
        for sample in samples:
            controller.add_step(sample.seconds)
        if estimator.step_seconds is not None:
            controller.measured(estimator.step_seconds)

    def consider(self) -> None:
        """Has the controller decide, if that is due and steps were measured since the last time, or
        memory may have changed."""
        estimator, controller = self._estimator, self._controller
        if not controller.is_due(self.steps):
            return
        if self._idle_steps > CONFIRMING or controller.streams:
            # There are no times to solve from, and no need.
            reason = "this rank computes no samples: its GPU updates all that fits there"
            if self._idle_steps <= CONFIRMING:
                reason = "matrices are updated on the GPU in any case: of state all that fits stays"
            controller.consider_idle(self.steps, self._limits(self.steps), reason)
            return
        if not self._has_new_steps and self.steps - self._considered_at < LOOK_EVERY:
            return
        if estimator.num_samples < CONFIRMING:
            return
        self._considered_at, self._has_new_steps = self.steps, False
        controller.consider(
            self.steps,
            estimator.costs,
            self._limits(self.steps),
            seconds=estimator.step_seconds,
            num_steps=estimator.num_samples,
            launch_bound=estimator.launch_bound,
        )

    def measures_next(self) -> bool:
        """Whether to measure the next step: all until times and placement settle, then 1 in 4."""
        if not self._controller.moves.is_settled:
            self.measured_since = 0
        self.measured_since += 1
        return self.measured_since <= MANY_STEPS or self.steps % _MEASURE_EVERY == 0
