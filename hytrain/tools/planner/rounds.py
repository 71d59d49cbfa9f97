"""Stage 3: how all ranks use the layers, and how many micro-batches they all make.

Layer by layer a layer is gathered once a pass, however many micro-batches a rank makes. One
micro-batch after another, each of them gathers every layer on all ranks: all make as many, a
*round* each, and all store activations or all compute them again. Few numbers of rounds can come
to the batch (:func:`candidate_rounds`). By the time that compute alone takes at least they are put
in order; from the shortest on each is denied by the program of search.py, or planned, until that
time alone is as long as the best step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hytrain.formats.policies import Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.accumulation_modes import Solver, some_rounds
from hytrain.tools.planner.baselines import samples_by_speed
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import sizes_to_choose
from hytrain.tools.planner.load_maker import LoadMaker, RoundLoads
from hytrain.tools.planner.min_plus import Floats
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.rebalance_samples import rebalance_samples
from hytrain.tools.planner.result import Plan, to_plan
from hytrain.tools.planner.search import CLOSE, PRECISION, search_program
from hytrain.tools.planner.step_program import StepProgram

# So many numbers of rounds, the most promising, are looked at for the finer model.
_MOST_OTHERS = 8


def best_rounds(problem: PlanProblem, solve: Solver) -> Plan | Infeasible:
    """One micro-batch after another: the best number of them, and a bound for all numbers.

    Args:
        problem: what is to be dealt to whom.
        solve: for one number of them; asked only where nothing fits, for the reason.
    """
    search = _Rounds(problem)
    search.run()
    found = min(search.plans, key=lambda plan: plan.predicted_seconds, default=None)
    best = found or some_rounds(problem, solve)
    if isinstance(best, Infeasible):
        return best
    shortest = min(plan.step_seconds for plan in [best, *search.plans])
    return replace(best, lower_bound=min(search.bound, shortest), shortest_step=shortest)


class _Rounds:
    """The search over numbers of rounds.

    Attributes:
        plans: that were found, of some numbers of rounds.
        undenied: no step of the numbers that were searched is shorter than the least of these.
    """

    def __init__(self, problem: PlanProblem) -> None:
        self._problem = problem
        self.plans: list[Plan] = []
        self.undenied: list[float] = []

    @property
    def goal(self) -> float:
        """Longer steps are not searched for."""
        least = min((plan.step_seconds for plan in self.plans), default=math.inf)
        return least * (1.0 - PRECISION)

    @property
    def bound(self) -> float:
        """No step by the lines is shorter."""
        return min([self.goal, *self.undenied])

    def run(self) -> None:
        """Searches all numbers, with each policy of all ranks, the most promising first."""
        problem = self._problem
        by_speed = some_rounds(problem, samples_by_speed)
        if isinstance(by_speed, Plan) and (
            problem.allow_idle or all(rank.batch_size for rank in by_speed.ranks)
        ):
            self.plans.append(by_speed)
        numbers = candidate_rounds(problem)
        makers = {
            even: RoundLoads(problem, even=even)
            for even in (True, False)[: problem.cluster.num_ranks]
        }
        left: list[tuple[float, bool, Activations, int]] = []
        for even, loads in makers.items():
            for policy in problem.activations:
                steps: list[float] = shortest_steps(problem, loads, policy, numbers).tolist()
                for step, number in zip(steps, numbers, strict=True):
                    left.append((step, even, policy, number))
        left.sort(key=lambda one: (one[0], not one[1]))
        for step, even, policy, number in left:
            if step >= self.goal:
                break
            one = replace(problem, activations=(policy,), rounds=number)
            self._search(one, makers[even].maker(one), self.goal, even=even)
        # Others may be faster by the finer model.
        for _, even, policy, number in left[:_MOST_OTHERS]:
            shortest = min((plan.predicted_seconds for plan in self.plans), default=0.0)
            if shortest <= CLOSE * self.bound:
                break
            one = replace(problem, activations=(policy,), rounds=number)
            self._search(one, makers[even].maker(one), shortest, even=even)

    def _search(self, problem: PlanProblem, loads: LoadMaker, worst: float, *, even: bool) -> None:
        """Plans of one number of rounds, if they may be faster than ``worst``."""
        program = StepProgram(problem, even=even, worst=worst, loads=loads)
        bound, trail = search_program(program, worst)
        if bound is None:
            return
        self.undenied.append(bound)
        if trail:
            found = rebalance_samples(problem, min(trail, key=lambda one: one.step))
            self.plans.append(to_plan(problem, found, found.step))


def candidate_rounds(problem: PlanProblem) -> list[int]:
    """The numbers of rounds that ranks with samples can all make.

    If their micro-batches are M samples together, R rounds of them are more than (R - 1) M samples
    and up to R M: R is the batch over M, rounded up.
    """
    batch = problem.batch
    largest = sum(_largest(problem, gpu) for _, gpu in problem.cluster.ranks)
    return sorted({-(-batch // together) for together in range(1, min(largest, batch) + 1)})


def _largest(problem: PlanProblem, gpu: GpuProfile) -> int:
    """Samples of the largest micro-batch."""
    return max(sizes_to_choose(replace(problem, rounds=1), gpu, problem.batch))


def shortest_steps(
    problem: PlanProblem, loads: RoundLoads, policy: Activations, numbers: Sequence[int]
) -> Floats:
    """For each number of rounds seconds that a step takes at least, whatever becomes of state.

    In R rounds the batch takes micro-batches of batch / R samples together. A rank gives so many
    of them as it has time for, if all its rounds but the last are full.
    """
    rounds = np.array(numbers, dtype=np.float64)[:, None]
    times: list[Floats] = []
    least = np.zeros(len(numbers))
    ranks = [gpu for _, gpu in problem.cluster.ranks]
    for gpu in {id(gpu): gpu for gpu in ranks}.values():
        own = _seconds(problem, loads, gpu, policy)
        if own.shape[1]:
            with np.errstate(invalid="ignore"):
                linear = own[2] + (rounds - 3.0) * (own[3] - own[2])
            seconds = np.where(rounds == 1.0, own[0], np.where(rounds == 2.0, own[1], linear))
            seconds[np.isnan(seconds)] = math.inf
            # A larger micro-batch that takes no longer is one that the smaller one may become.
            seconds = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]
            times += [seconds] * sum(other is gpu for other in ranks)
            first = seconds[:, 0]
        else:
            first = np.full(len(numbers), math.inf)
        if not problem.allow_idle:
            least = np.maximum(least, first)
    if not times:
        return np.full(len(numbers), math.inf)
    ordered = np.sort(np.concatenate(times, axis=1), axis=1)
    needed = np.array([-(-problem.batch // number) for number in numbers])
    is_enough = needed <= ordered.shape[1]
    last = ordered[np.arange(len(numbers)), np.minimum(needed, ordered.shape[1]) - 1]
    return np.maximum(np.where(is_enough, last, math.inf), least)


def _seconds(
    problem: PlanProblem, loads: RoundLoads, gpu: GpuProfile, policy: Activations
) -> Floats:
    """Of one to four rounds (rows) by size (columns), all but the last round full.

    Infinite where that leaves no room.
    """
    columns: list[list[float]] = []
    for size in range(1, _largest(problem, gpu) + 1):
        works = [loads.of(gpu, 1, size, size, policy)]
        works += [loads.of(gpu, number, 1, size, policy) for number in (2, 3, 4)]
        columns.append([work.compute if work.room >= 0.0 else math.inf for work in works])
        if not math.isfinite(min(columns[-1])):
            break  # larger ones leave even less
    return np.array(columns).reshape(-1, 4).T
