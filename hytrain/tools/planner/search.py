"""The first stage of planning: the shortest step by the roofline bounds, and plans that come near.

Whether a step of some length is possible is asked of step_program.py. No is certain, so the longest
step of which that is known is a bound: mostly that in which the ranks can just compute the batch,
whatever the state. What it says to a longer one is dealt in whole samples (here) and whole layers
(allocation.py) at once, which may take a little longer. Lengths are bisected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import (
    Collectives,
    Workload,
    WorkloadMaker,
    fits_rounds,
    sizes_to_choose,
)
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import TOLERANCE, Found, settle
from hytrain.tools.planner.step_program import Choice, StepProgram, whole_parts

CLOSE = 1.02
"""A plan that takes at most so many times the bound is as good as the best."""
PRECISION = 4e-3
"""Between a plan and a bound that differ by no more than this share nothing is searched for."""
# Where whole ranks and layers leave plans longer than the bound, longer steps are tried up to here.
_FARTHEST = 1.0
_LONGER = (1.01, 1.03, 1.1)


@dataclass(slots=True)
class Search:
    """What is known of the shortest step.

    Attributes:
        bound: no step by the roofline bounds is shorter; infinite where none is possible.
        trail: the plans that the search has come by.
    """

    bound: float = math.inf
    trail: list[Found] = field(default_factory=list[Found])

    @property
    def shortest(self) -> list[Found]:
        """The best of the trail, the best with other shards after it."""
        own = ([one for one in self.trail if one.even == even] for even in (True, False))
        best = [min(found, key=lambda one: one.step) for found in own if found]
        return sorted(best, key=lambda one: one.step)


def search(problem: PlanProblem, worst: float = math.inf) -> Search:
    """Searches with even and with unequal shards, steps up to ``worst`` seconds."""
    found = Search()
    # Unequal shards first: they may allow much shorter steps.
    for even in (False, True)[problem.cluster.num_ranks == 1 :]:
        own = search_program(StepProgram(problem, even=even, worst=worst), worst)
        found = Search(min(found.bound, own.bound), found.trail + own.trail)
        # Where both are as good, even shards have the faster collectives.
        worst = min([worst, *(one.step * (1.0 + PRECISION) for one in own.trail)])
    return found


def longer(problem: PlanProblem, step: float) -> list[Found]:
    """Plans of steps that are longer than so many seconds, in which the CPU has more time."""
    found: list[Found | None] = []
    for even in (False, True)[problem.cluster.num_ranks == 1 :]:
        program = StepProgram(problem, even=even, worst=_LONGER[-1] * step)
        dealer = Dealer(problem, even=even)
        steps = [factor * step for factor in _LONGER]
        found += [dealer.plan(program.choose(seconds), seconds) for seconds in steps]
    return [one for one in found if one is not None]


def search_program(program: StepProgram, worst: float) -> Search:
    """A bound on a program's steps, and plans of steps up to ``worst`` seconds or little longer."""
    longest = min(program.longest, worst)
    if program.spare_samples(longest) < 0:
        return Search()
    low = _bisect(lambda step: program.spare_samples(step) >= 0, 0.0, longest, TOLERANCE)
    trail: list[Found] = []
    dealer = Dealer(program.problem, even=program.even)

    def able(step: float) -> bool:
        choices = program.choose(step)
        if (found := dealer.plan(choices, low)) is not None:
            trail.append(found)
        return choices is not None

    growth, high = PRECISION, min(low * (1.0 + TOLERANCE), longest)
    while not able(high):
        if high >= longest:
            return Search()
        low, high = high, min(high * (1.0 + growth), longest)
        growth *= 2.0
    low = _bisect(able, low, high, PRECISION / 4.0)
    more = PRECISION
    while more <= _FARTHEST and low < longest:
        step = min(low * (1.0 + more), longest)
        if min((one.step for one in trail), default=math.inf) <= step:
            break
        able(step)
        more *= 2.0
    return Search(low, trail)


def _bisect(able: Callable[[float], bool], low: float, high: float, precision: float) -> float:
    """The longest that is known not to be able, to the precision; ``high`` is."""
    while high - low > precision * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if able(middle) else (middle, high)
    return low


class Dealer:
    """Workloads of whole samples."""

    def __init__(self, problem: PlanProblem, *, even: bool) -> None:
        """``even``: whether all shards are equal."""
        self._problem = problem
        self._even = even
        self._make = WorkloadMaker(problem, Collectives.of(problem, even=even))
        self._gpus = [gpu for _, gpu in problem.cluster.ranks]

    def of_size(
        self, gpu: GpuProfile, batch: int, size: int, policy: Activations
    ) -> Workload | None:
        """With these micro-batches; None where they leave no room or do not make the rounds."""
        if not fits_rounds(self._problem, batch, size):
            return None
        work = self._make.of(gpu, batch, size, policy)
        return work if work.room >= 0.0 else None

    def fastest(self, gpu: GpuProfile, batch: int, policy: Activations) -> Workload | None:
        """With the fastest micro-batches; None where none will do."""
        sizes = sizes_to_choose(self._problem, gpu, batch) if batch else (0,)
        made = (self.of_size(gpu, batch, size, policy) for size in sizes)
        roomy = (work for work in made if work is not None)
        return min(roomy, key=lambda work: work.compute, default=None)

    def plan(self, choices: Sequence[Choice] | None, least: float) -> Found | None:
        """What was chosen, as a plan with its own shortest step, from ``least`` seconds on."""
        dealt = self._whole(choices) if choices else None
        return None if dealt is None else settle(self._problem, dealt, least, even=self._even)

    def _whole(self, choices: Sequence[Choice]) -> list[Workload] | None:
        """Whole samples that are the batch, in micro-batches of the sizes that were chosen."""
        batches = whole_parts([choice.samples for choice in choices], self._problem.batch)
        dealt: list[Workload] = []
        for gpu, choice, batch in zip(self._gpus, choices, batches, strict=True):
            work = self.of_size(gpu, batch, min(choice.size, batch), choice.activations)
            if work is None:
                return None
            dealt.append(work)
        return dealt
