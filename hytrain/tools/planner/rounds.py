"""Stage 3: how all ranks use the layers, and how many micro-batches they all make.

Layer by layer a layer is gathered once a pass, however many micro-batches a rank makes. One
micro-batch after another, each of them gathers every layer on all ranks: all make as many, a
*round* each, and all store activations or all compute them again. The number of rounds is searched
by branch and bound: for a range of them, a program whose ranks may each make any number of the
range tells whether one of these may be faster than the best so far. If so the range is cut, down to
single numbers, which are planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hytrain.formats.policies import MANNERS, Accumulation, Activations
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import TOLERANCE, OtherManner, Plan
from hytrain.tools.planner.search import lower_bound
from hytrain.tools.planner.step_program import StepProgram
from hytrain.tools.uneven.solver import Infeasible

Solver = Callable[[PlanProblem], "Plan | Infeasible"]
"""Gives a problem's plan."""
BoundedSolver = Callable[[PlanProblem, float], "Plan | Infeasible"]
"""Gives a problem's plan. It may say that there is none where no step is shorter than so many
seconds."""

# Numbers of rounds that gain less than this share are not searched for.
_GAIN = 0.004
# So many of them are planned for a policy, before all policies were looked at and after; what is
# left open then makes the bound, and so does what is left after so many looks.
_FIRST_PLANNED = 3
_MOST_PLANNED = 12
_MOST_LOOKS = 400
# Ranges that end at less than so many times their begin are tried by one of their numbers.
_NARROW = 1.1
# So many further numbers of micro-batches are tried without a gain.
_WORSE = 3


def best_manner(problem: PlanProblem, solve: Solver, solve_rounds: Solver) -> Plan | Infeasible:
    """The best solution of stage 3, where all ranks use each layer as often, in the same order.

    Args:
        problem: what is to be dealt to whom.
        solve: for ranks that go layer by layer.
        solve_rounds: for ranks that compute one micro-batch after another.
    """
    found: dict[Accumulation, Plan | Infeasible] = {}
    for manner, group in MANNERS.items():
        policies: tuple[Activations, ...] = tuple(
            policy for policy in problem.activations if policy in group
        )
        if policies:
            solver = solve if manner == "layer_major" else solve_rounds
            found[manner] = solver(replace(problem, activations=policies))
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    if not plans:
        return _nearest([one for one in found.values() if isinstance(one, Infeasible)])
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    others = [
        OtherManner(manner, other if isinstance(other, Infeasible) else other.predicted_seconds)
        for manner, other in found.items()
        if other is not best
    ]
    bound = min(plan.lower_bound for plan in plans)
    return replace(best, lower_bound=bound, other_manner=others[0] if others else None)


def some_rounds(problem: PlanProblem, solve: Solver) -> Plan | Infeasible:
    """One micro-batch after another: the best of some numbers of them, by policy."""
    best: Plan | None = None
    refusals: list[Infeasible] = []
    for policy in problem.activations:
        worse = 0
        for rounds in _numbers(problem.batch):
            found = solve(replace(problem, activations=(policy,), rounds=rounds))
            if isinstance(found, Infeasible):
                refusals.append(found)
            elif best is None or found.predicted_seconds < best.predicted_seconds:
                best, worse = found, 0
            else:
                worse += 1
            if worse == _WORSE:
                break
    return _nearest(refusals) if best is None else best


def best_rounds(problem: PlanProblem, solve: BoundedSolver) -> Plan | Infeasible:
    """One micro-batch after another: the best number of them, and a bound for all numbers."""
    search = _Rounds(problem, solve)
    search.run()
    if not search.plans:
        return some_rounds(problem, lambda one: solve(one, math.inf))
    least = min(plan.predicted_seconds for plan in search.plans)
    able = (plan for plan in search.plans if plan.predicted_seconds <= least * (1.0 + TOLERANCE))
    best = min(able, key=_rounds_of)
    return replace(best, lower_bound=search.bound)


def _rounds_of(plan: Plan) -> int:
    return max(-(-rank.batch_size // max(1, rank.microbatch_size)) for rank in plan.ranks)


class _Rounds:
    """The search over numbers of rounds.

    Attributes:
        plans: that were found, of some numbers of rounds.
        bound: no plan is faster.
    """

    def __init__(self, problem: PlanProblem, solve: BoundedSolver) -> None:
        self._problem = problem
        self._solve = solve
        # What is promised, which is no less than the step by the lines: that is what ranges deny.
        self._shortest = math.inf
        self._looks = _MOST_LOOKS
        self._gain = _GAIN
        self._planned: set[tuple[Activations, int]] = set()
        self._bounds: list[float] = []
        self.plans: list[Plan] = []
        self.bound = math.inf

    def run(self) -> None:
        """Searches all numbers, with each policy of all ranks."""
        policies = self._problem.activations
        everything = range(1, self._problem.batch + 1)
        left = list[tuple[Activations, range]]()
        for policy in policies:
            left.append((policy, everything))
        # First a few plans of each policy: what the others' are compared with.
        for most in (_FIRST_PLANNED, _MOST_PLANNED):
            again = left
            left = list[tuple[Activations, range]]()
            for policy, numbers in again:
                left += [(policy, part) for part in self._search(policy, numbers, most)]
        self._bounds += [self._bound_of(policy, numbers) for policy, numbers in left]
        self.bound = min([self._shortest * (1.0 - _GAIN), *self._bounds])
        # Of equally fast ones the fewest.
        self._gain = -TOLERANCE
        for plan in sorted(self.plans, key=lambda plan: plan.predicted_seconds)[:1]:
            fewer = range(1, _rounds_of(plan))
            for policy in policies if fewer else ():
                self._search(policy, fewer, 1)

    def _search(self, policy: Activations, numbers: range, most: int) -> list[range]:
        """Plans up to so many numbers of rounds; gives back the ranges that are left."""
        ranges, open_ = [numbers], list[range]()
        while ranges:
            numbers = ranges.pop()
            if most <= 0 or self._looks <= 0:
                open_.append(numbers)
                continue
            suggested = self._suggested(policy, numbers)
            if suggested is None:
                continue
            if len(numbers) == 1:
                if (policy, suggested) not in self._planned:
                    self._planned.add((policy, suggested))
                    self._plan(policy, suggested)
                    most -= 1
            elif numbers[-1] > _NARROW * numbers[0]:
                middle = math.isqrt(numbers[0] * numbers[-1])
                halves = [range(numbers[0], middle + 1), range(middle + 1, numbers[-1] + 1)]
                # The last one is next.
                is_later = suggested > middle and self._gain > 0.0
                ranges += halves if is_later else reversed(halves)
            else:
                around = range(numbers[0], suggested), range(suggested + 1, numbers[-1] + 1)
                ranges += [part for part in around if part]
                ranges.append(range(suggested, suggested + 1))
        return open_

    def _plan(self, policy: Activations, rounds: int) -> None:
        one = replace(self._problem, activations=(policy,), rounds=rounds)
        found = self._solve(one, self._shortest * (1.0 + TOLERANCE))
        if isinstance(found, Plan):
            self.plans.append(found)
            self._shortest = min(self._shortest, found.predicted_seconds)
            self._bounds.append(found.lower_bound)
        else:
            self._bounds.append(self._bound_of(policy, range(rounds, rounds + 1)))

    def _programs(self, policy: Activations, numbers: range) -> Iterator[StepProgram]:
        # What a rank without samples takes is that of the fewest.
        own = replace(self._problem, activations=(policy,), rounds=numbers[0])
        for even in (True, False)[: self._problem.cluster.num_ranks]:
            yield StepProgram(
                own, even=even, worst=self._shortest * (1.0 + TOLERANCE), rounds=numbers
            )

    def _suggested(self, policy: Activations, numbers: range) -> int | None:
        """A number of rounds that may be fast enough; None where none of them is."""
        self._looks -= 1
        for program in self._programs(policy, numbers):
            longest = min(self._shortest * (1.0 - self._gain), program.longest())
            choices = program.choose(longest)
            if choices is None:
                continue
            made = [math.ceil(one.samples / one.microbatch) for one in choices if one.microbatch]
            middle = sorted(made)[len(made) // 2] if made else numbers[len(numbers) // 2]
            return min(max(middle, numbers[0]), numbers[-1])
        return None

    def _bound_of(self, policy: Activations, numbers: range) -> float:
        """No plan with one of these numbers of rounds is faster."""
        bounds = (lower_bound(one, self._shortest) for one in self._programs(policy, numbers))
        return min((bound for bound in bounds if bound is not None), default=math.inf)


def _nearest(refusals: Sequence[Infeasible]) -> Infeasible:
    """The one that comes nearest to fitting."""
    close = [refusal for refusal in refusals if refusal.is_close]
    lacking = [refusal for refusal in refusals if refusal.missing > 0.0]
    if close or not lacking:
        return (close or refusals)[0]
    return min(lacking, key=lambda refusal: refusal.missing)


def _numbers(batch: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: each by a half or a third more than the one before."""
    number = 1
    while number <= batch:
        yield number
        if number > 1 and number * 3 // 2 <= batch:
            yield number * 3 // 2
        number *= 2
