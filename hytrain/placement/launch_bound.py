"""Launch-bound steps: all layers that fit go to the GPU, unless fewer there prove faster.

The GPU waits for the host to launch its kernels then. It has time for the updates, while updates on
the CPU take cores and memory bandwidth from the launching thread, by an amount that no step at
another placement shows. What fewer GPU layers can win is what the GPU takes to update the others
and to launch that; on every host measured so far it was less than all that fits has won. Such hosts
drift by 10 % and more, so that the solver's choice and all that fits are compared in turns, once
for a workload.
"""

from __future__ import annotations

import statistics
from collections import deque

from hytrain.placement.memory import Bounds

VISIT_STEPS = 8
"""Steps of one way before the next: a visit to a bad one costs little, its median holds."""
LEAST_GAIN = 0.04
"""Share of the step that the other way must win in both comparisons: twice by more than noise."""


class PairedTrial:
    """The other way to run a step, the present one, and both again if the other seemed faster.

    Steps of one machine differ by 10 to 30 % within a minute: only what is measured next to each
    other is compared, and what seems better has to be so twice.
    """

    def __init__(self) -> None:
        self._visits: list[float] = []

    @property
    def is_at_other(self) -> bool:
        """Whether the next visit is to the other way."""
        return len(self._visits) % 2 == 0

    def add_visit(self, seconds: float) -> bool | None:
        """A visit is over, whose median step took so long.

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
    """Where layers are while steps are launch-bound."""

    def __init__(self) -> None:
        self.is_seen = False
        """Steps of this workload were: with few layers on the GPU a wait for the CPU may hide it,
        so that it is not forgotten until the workload is another one."""
        self._trial = PairedTrial()
        self._most: int | None = None
        self._other: int | None = None
        self._fewer_are_faster: bool | None = None
        self._here = 0
        self._steps: deque[float] = deque(maxlen=VISIT_STEPS)

    @property
    def is_settled(self) -> bool:
        """Nothing is being compared any more."""
        return self._fewer_are_faster is not None

    def add_step(self, gpu_layers: int, seconds: float) -> None:
        """A step took so long at a settled placement."""
        if gpu_layers != self._here:
            self._here = gpu_layers
            self._steps.clear()
        self._steps.append(seconds)

    def choose(self, here: int, allowed: Bounds, solved: int) -> int | None:
        """Where to be next; None: fewer than all that fit are faster, the solver's choice holds.

        ``solved``: the number that the solver would choose.
        """
        most = allowed.max_gpu_layers
        if here == self._most and allowed.allow(here) and not _is_more(here, allowed):
            most = here  # free memory wavers
        self._most = most
        # Memory may have changed since: what does not fit any more is not gone to.
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
    """Whether so much more fits than here that it is no mere wavering of free memory."""
    fits = allowed.max_gpu_layers
    return fits - here >= (1 if fits == allowed.num_layers else allowed.notable_layers)
