"""The search for the shortest step by the lines of cost_model.py, and a bound on it.

Whether a step of some length is possible is asked of step_program.py. No is certain, so the longest
step of which that is known is a bound. What it says to a longer one is dealt in whole samples and
whole layers (deal_samples.py, allocation.py) at once, which may take a little longer. Lengths are
bisected between the bound and the best plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hytrain.tools.planner.deal_samples import deals
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import TOLERANCE, Found, settle
from hytrain.tools.planner.step_program import Choice, StepProgram

CLOSE = 1.02
"""A plan that takes at most so many times the bound by the finer model is as good as the best."""
PRECISION = 4e-3
"""Between a plan and a bound that differ by no more than this share nothing is searched for."""
# The same where a rival is faster.
_COARSE = 0.05
# Programs of so few columns are solved in no time: there more is known.
_SMALL = 400
_FINE = 5e-4
# Where no step may be longer than so much more than what is proven, that one is asked for first.
_NEAR = 0.02
# Plans of longer steps take so many times the shortest; they come of no larger programs.
_LONGER = (1.01, 1.03, 1.1)
_MOST_COLUMNS = 20_000
# Lengths of a step between the bound and the plan, more than the bound, are tried up to here.
_FARTHEST = 1.0


class Search:
    """The search for the shortest step by the lines.

    Attributes:
        bound: no step is shorter; infinite where none is possible.
        trail: the plans that it has come by.
    """

    def __init__(self, problem: PlanProblem, worst: float, rival: float = math.inf) -> None:
        """
        Args:
            problem: what is to be dealt to whom.
            worst: seconds of a step; longer ones are of no interest.
            rival: of longer ones than this it is enough to know about how long they are.
        """
        self._problem = problem
        self.bound = math.inf
        self.trail: list[Found] = []
        # Unequal shards first: they may allow much shorter steps.
        for even in (True, False)[: problem.cluster.num_ranks][::-1]:
            program = StepProgram(problem, even=even, worst=worst)
            bound, trail = search_program(program, worst, rival)
            self.bound = min(self.bound, math.inf if bound is None else bound)
            self.trail += trail
            # Where both are as good, even shards have the faster collectives.
            worst = min([worst, *(one.step * (1.0 + PRECISION) for one in trail)])

    def longer(self, step: float) -> list[Found]:
        """Plans of longer steps than so many seconds, in which the CPU has more time."""
        found: list[Found] = []
        for even in (True, False)[: self._problem.cluster.num_ranks]:
            program = StepProgram(self._problem, even=even, worst=_LONGER[-1] * step)
            for factor in _LONGER:
                choices = program.choose(factor * step, most_columns=_MOST_COLUMNS)
                found += dealt(program, choices, factor * step)
        return found

    @property
    def shortest(self) -> list[Found]:
        """The best of the trail, the best with other shards after it."""
        own = ([one for one in self.trail if one.even == even] for even in (True, False))
        best = [min(found, key=lambda one: one.step) for found in own if found]
        return sorted(best, key=lambda one: one.step)


def search_program(
    program: StepProgram, worst: float, rival: float = math.inf
) -> tuple[float | None, list[Found]]:
    """A bound on a program's steps, and plans of steps up to ``worst`` seconds or a little longer.

    None and no plan where no step of up to ``worst`` seconds is possible. The rival is that of
    :class:`Search`.
    """
    longest = min(program.longest(), worst)
    if not program.covers(longest):
        return None, []
    low, _ = _bisect(program.covers, 0.0, longest, TOLERANCE)
    # Ranks in parts take less time, and tell most.
    bound = _relaxed_bound(program, low, longest)
    if bound is None:
        return None, []
    if longest < bound * (1.0 + _NEAR) and program.choose(longest) is None:
        return None, []
    return _search_above(program, bound, longest, rival)


def _relaxed_bound(program: StepProgram, low: float, longest: float) -> float | None:
    """What ranks that need not be whole prove; None where nothing up to ``longest`` is possible."""

    def able(step: float) -> bool:
        return program.choose(step, whole=False) is not None

    if able(low * (1.0 + TOLERANCE)):
        return low
    if not able(longest):
        return None
    growth = PRECISION
    high = min(low * (1.0 + growth), longest)
    while not able(high):
        growth *= 2.0
        low, high = high, min(high * (1.0 + growth), longest)
    return _bisect(able, low, high, PRECISION / 4.0)[0]


def _search_above(
    program: StepProgram, bound: float, longest: float, rival: float
) -> tuple[float | None, list[Found]]:
    """The bound raised, and plans, until both are close or neither can be had better.

    First the shortest step that is not denied is searched for; whatever is possible on the way is
    dealt. Where that leaves plans longer than it, some longer steps are tried.
    """
    trail: list[Found] = []
    low, high, step = bound, math.inf, bound
    growth = precision = PRECISION
    if bound > rival:
        growth = precision = _COARSE
        step = min(bound * (1.0 + precision), longest)

    def is_open() -> bool:
        is_small = precision == PRECISION and program.num_columns <= _SMALL
        return high > low * (1.0 + (_FINE if is_small else precision))

    while is_open():
        choices = program.choose(step)
        if choices is None:
            if step >= longest:
                return None, []
            low = step
        else:
            trail += dealt(program, choices, low)
            high = min([step, *(one.step for one in trail)])
        if math.isfinite(high):
            step = (low + high) / 2.0
        else:
            step = min(low * (1.0 + growth), longest)
            growth *= 2.0
    more = _FINE
    while more <= _FARTHEST:
        step = min(high * (1.0 + more), longest)
        if trail and step >= min(one.step for one in trail) * (1.0 - TOLERANCE):
            break
        trail += dealt(program, program.choose(step), low)
        if not trail:  # whole layers may fit into what leaves more room
            trail += dealt(program, program.choose(step, roomy=True), low)
        if step >= longest:
            break
        more *= 2.0
    return low, trail


def dealt(program: StepProgram, choices: list[Choice] | None, least: float) -> list[Found]:
    """Plans for what was chosen, each with its own shortest step, from ``least`` seconds on."""
    if not choices:
        return []
    settled = (
        settle(program.problem, loads, least, even=program.even)
        for loads in deals(program.problem, choices, even=program.even)
        if min(work.room for work in loads) >= 0.0
    )
    return [found for found in settled if found is not None]


def _bisect(
    able: Callable[[float], bool], low: float, high: float, precision: float
) -> tuple[float, float]:
    """Where it becomes able, to the precision; it is at ``high``."""
    while high - low > precision * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if able(middle) else (middle, high)
    return low, high
