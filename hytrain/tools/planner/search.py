"""The search for the shortest step by the lines of cost_model.py, and a bound on it.

Whether a step of some length is possible is asked of step_program.py. No is certain, so the longest
step of which that is known is a bound. What it says to a longer one is dealt in whole samples and
whole layers (deal_samples.py, allocation.py), which may take a little longer; a few more lengths
are tried as long as that may gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hytrain.tools.planner.deal_samples import deals
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import TOLERANCE, Found, settle
from hytrain.tools.planner.step_program import Choice, StepProgram

# The bound is known to this share, which is less than what whole layers and samples take.
_PRECISION = 1e-3
# Lengths of a step between the bound and the plan, more than the bound, are tried up to here.
_FARTHEST = 1.0


class Search:
    """The search for the shortest step by the lines.

    Attributes:
        bound: no step is shorter; infinite where none is possible.
        trail: the plans that it has come by.
    """

    def __init__(self, problem: PlanProblem, worst: float) -> None:
        """
        Args:
            problem: what is to be dealt to whom.
            worst: seconds of a step; longer ones are of no interest.
        """
        self.bound = math.inf
        self.trail: list[Found] = []
        # Even shards first: where both are as good, their collectives are faster.
        for even in (True, False)[: problem.cluster.num_ranks]:
            bound, trail = search_program(StepProgram(problem, even=even, worst=worst), worst)
            self.bound = min(self.bound, math.inf if bound is None else bound)
            self.trail += trail

    @property
    def shortest(self) -> list[Found]:
        """The best of the trail, the best with other shards after it."""
        own = ([one for one in self.trail if one.even == even] for even in (True, False))
        best = [min(found, key=lambda one: one.step) for found in own if found]
        return sorted(best, key=lambda one: one.step)


def search_program(program: StepProgram, worst: float) -> tuple[float | None, list[Found]]:
    """A bound on a program's steps, and plans: of steps from the bound up, while that may gain.

    None and no plan where no step of up to ``worst`` seconds is possible.
    """
    trail: list[Found] = []
    bound = lower_bound(program, worst)
    if bound is None:
        return None, trail
    longest = min(program.longest(), worst)
    more = TOLERANCE
    while True:
        step = min(bound * (1.0 + more), longest)
        if trail and step >= min(one.step for one in trail) * (1.0 - TOLERANCE):
            return bound, trail
        choices = program.choose(step)
        if choices:
            trail += dealt(program, choices, step)
        if step >= longest or more > _FARTHEST:
            return bound, trail
        more *= 2.0


def dealt(program: StepProgram, choices: list[Choice], step: float) -> list[Found]:
    """Plans for what was chosen; the step may come out longer."""
    problem, even = program.problem, program.even
    settled = (
        settle(problem, loads, step, even=even)
        for loads in deals(problem, choices, even=even)
        if min(work.room for work in loads) >= 0.0
    )
    return [found for found in settled if found is not None]


def lower_bound(program: StepProgram, worst: float = math.inf) -> float | None:
    """The longest step that is proven impossible; None where every step up to ``worst`` is."""
    longest = min(program.longest(), worst)
    if not program.covers(longest):
        return None
    low, high = _bisect(program.covers, 0.0, longest, TOLERANCE)
    is_near = math.isfinite(worst)
    for whole in (False, True):  # ranks in parts take less time, and tell most
        if is_near and program.choose(longest, whole=whole) is None:
            return None

        def able(step: float, whole: bool = whole) -> bool:
            return program.choose(step, whole=whole) is not None

        growth = TOLERANCE if not whole else _PRECISION
        high = max(high, low * (1.0 + TOLERANCE))
        while not able(high):
            if high >= longest:
                return None
            low, high = high, min(high * (1.0 + growth), longest)
            growth *= 2.0
        low, high = _bisect(able, low, high, _PRECISION)
    return low


def _bisect(
    able: Callable[[float], bool], low: float, high: float, precision: float
) -> tuple[float, float]:
    """Where it becomes able, to the precision; it is at ``high``."""
    while high - low > precision * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if able(middle) else (middle, high)
    return low, high
