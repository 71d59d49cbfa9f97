"""Launch-bound steps: all layers that fit go to the GPU, unless fewer there prove faster.

In such steps the GPU waits for the host to launch its kernels. It has time for the updates, while
updates on the CPU take cores and memory bandwidth from the launching thread, by an amount that no
step at another placement shows. Fewer GPU layers save the time of updating the others on the GPU
and of launching that; on every host measured so far it was less than all that fits has gained. Such
hosts drift by 10 % and more, so that the solver's choice and all that fits are compared in turns,
once per workload.
"""

from __future__ import annotations

import statistics
from collections import deque

from hytrain.placement.memory import Bounds

VISIT_STEPS = 8
"""Steps of a visit to one way of running: a bad one costs little, and the median is reliable."""
LEAST_GAIN = 0.04
"""Share of the step that the other way must gain: more than noise, in each of two comparisons."""


class PairedTrial:
    """A trial of another way to run a step and the present one, repeated if the other seems faster.

    Steps of one machine differ by 10 to 30 % within a minute: only successive visits are compared,
    and what seems better has to be so twice.
    """

    def __init__(self) -> None:
        self._visits: list[float] = []

    @property
    def is_at_other(self) -> bool:
        """Whether the next visit is to the other way."""
        return len(self._visits) % 2 == 0

    def add_visit(self, seconds: float) -> bool | None:
        """Adds a visit whose median step took ``seconds``.

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


class LaunchBoundPlacement:
    """Decides where layers are while steps are launch-bound."""

    def __init__(self) -> None:
        self.is_seen = False
        """Whether steps of this workload were launch-bound: with few layers on the GPU a wait for
        the CPU may hide that, so that it is not forgotten then."""
        self._trial = PairedTrial()
        self._most: int | None = None
        self._other: int | None = None
        self._fewer_are_faster: bool | None = None
        self._here = 0
        self._steps: deque[float] = deque(maxlen=VISIT_STEPS)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being compared any more."""
        return self._fewer_are_faster is not None

    def add_step(self, gpu_layers: int, seconds: float) -> None:
        """Adds the time of a step at a settled placement."""
        if gpu_layers != self._here:
            self._here = gpu_layers
            self._steps.clear()
        self._steps.append(seconds)

    def choose(self, here: int, allowed: Bounds, solved: int) -> int | None:
        """The next number of GPU layers; None: the solver's choice holds.

        It does if fewer than all that fit are faster. ``solved``: the number that it would choose.
        """
        most = allowed.max_gpu_layers
        if here == self._most and allowed.allow(here) and not _is_more(here, allowed):
            most = here  # free memory fluctuates
        self._most = most
        # Memory may have changed since: a number that no longer fits is not chosen.
        other = allowed.clamp(solved if self._other is None else self._other)
        if other != self._other:
            self._other, self._trial = other, PairedTrial()
        if other >= most and not self.is_settled:
            self._fewer_are_faster = False
        at_other = self._trial.is_at_other
        is_there = here == (other if at_other else most) == self._here
        if not self.is_settled and is_there and len(self._steps) == VISIT_STEPS:
            self._fewer_are_faster = self._trial.add_visit(statistics.median(self._steps))
            self._steps.clear()
            at_other = self._trial.is_at_other
        if self.is_settled:
            return None if self._fewer_are_faster else most
        return other if at_other else most


def _is_more(here: int, allowed: Bounds) -> bool:
    """Whether more layers fit than are here, by more than free memory fluctuates."""
    fits = allowed.max_gpu_layers
    return fits - here >= (1 if fits == allowed.num_layers else allowed.notable_layers)
