"""The first stage of planning: the shortest step by the roofline bounds, and plans close to it.

step_program.py says whether a step of a given length is possible. A no is certain, so the longest
step that is known to be impossible is a bound: mostly that in which the ranks can just compute the
batch, ignoring state. The answer for a longer step is dealt at once in whole samples (here) and
whole layers (allocation.py), which may take a little longer. Lengths are bisected.
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
"""A plan that takes at most this many times the bound counts as the best."""
PRECISION = 4e-3
"""A plan and a bound that differ by no more than this share end the search."""
# If plans of whole ranks and layers are longer than the bound, steps up to this share above it are
# tried.
_FARTHEST = 1.0
_LONGER = (1.01, 1.03, 1.1)


@dataclass(slots=True)
class Search:
    """What is known of the shortest step.

    Attributes:
        bound: no step by the roofline bounds is shorter; infinite if none is possible.
        trail: the plans found during the search.
    """

    bound: float = math.inf
    trail: list[Found] = field(default_factory=list[Found])

    @property
    def shortest(self) -> list[Found]:
        """The best plans of the trail with even and with unequal shards, the shorter one first."""
        own = ([one for one in self.trail if one.even == even] for even in (True, False))
        best = [min(found, key=lambda one: one.step) for found in own if found]
        return sorted(best, key=lambda one: one.step)


def search(problem: PlanProblem, worst: float = math.inf) -> Search:
    """Searches steps of up to ``worst`` seconds with even and with unequal shards."""
    found = Search()
    # Unequal shards first: they may allow much shorter steps.
    for even in (False, True)[problem.cluster.num_ranks == 1 :]:
        own = search_program(StepProgram(problem, even=even, worst=worst), worst)
        found = Search(min(found.bound, own.bound), found.trail + own.trail)
        # If both are about as good, even shards have the faster collectives.
        worst = min([worst, *(one.step * (1.0 + PRECISION) for one in own.trail)])
    return found


def longer(problem: PlanProblem, step: float) -> list[Found]:
    """Returns plans of steps longer than ``step`` seconds, in which the CPU has more time."""
    found: list[Found | None] = []
    for even in (False, True)[problem.cluster.num_ranks == 1 :]:
        program = StepProgram(problem, even=even, worst=_LONGER[-1] * step)
        dealer = Dealer(problem, even=even)
        steps = [factor * step for factor in _LONGER]
        found += [dealer.plan(program.choose(seconds), seconds) for seconds in steps]
    return [one for one in found if one is not None]


def search_program(program: StepProgram, worst: float) -> Search:
    """Returns a bound on a program's steps, and plans of up to ``worst`` seconds or a bit more."""
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
    """Returns the longest step known to be impossible, to the precision; ``high`` is possible."""
    while high - low > precision * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if able(middle) else (middle, high)
    return low


class Dealer:
    """Makes workloads of whole samples."""

    def __init__(self, problem: PlanProblem, *, even: bool) -> None:
        """``even``: whether all shards are equal."""
        self._problem = problem
        self._even = even
        self._make = WorkloadMaker(problem, Collectives.of(problem, even=even))
        self._gpus = [gpu for _, gpu in problem.cluster.ranks]

    def of_size(
        self, gpu: GpuProfile, batch: int, size: int, policy: Activations
    ) -> Workload | None:
        """Returns the workload with these micro-batches; None: no room, or not the right rounds."""
        if not fits_rounds(self._problem, batch, size):
            return None
        work = self._make.of(gpu, batch, size, policy)
        return work if work.room >= 0.0 else None

    def fastest(self, gpu: GpuProfile, batch: int, policy: Activations) -> Workload | None:
        """Returns the workload with the fastest micro-batches; None if none fits."""
        sizes = sizes_to_choose(self._problem, gpu, batch) if batch else (0,)
        made = (self.of_size(gpu, batch, size, policy) for size in sizes)
        roomy = (work for work in made if work is not None)
        return min(roomy, key=lambda work: work.compute, default=None)

    def plan(self, choices: Sequence[Choice] | None, least: float) -> Found | None:
        """Returns the choices as a plan with its own shortest step, ``least`` seconds or more."""
        dealt = self._whole(choices) if choices else None
        return None if dealt is None else settle(self._problem, dealt, least, even=self._even)

    def _whole(self, choices: Sequence[Choice]) -> list[Workload] | None:
        """Returns workloads of whole samples that sum to the batch, in micro-batches as chosen."""
        batches = whole_parts([choice.samples for choice in choices], self._problem.batch)
        dealt: list[Workload] = []
        for gpu, choice, batch in zip(self._gpus, choices, batches, strict=True):
            work = self.of_size(gpu, batch, min(choice.size, batch), choice.activations)
            if work is None:
                return None
            dealt.append(work)
        return dealt
