"""Stage 3: all ranks go layer by layer, or all make equally many micro-batches one after another.

One after another, each micro-batch gathers every layer on all ranks: all make as many of them,
called *rounds*, and all store activations or all recompute them. Few numbers of rounds can make up
the batch (:func:`candidate_rounds`). They are ordered by the least time of their compute alone, and
searched from the shortest on, until that time alone is as long as the best step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from hytrain.formats.policies import ACCUMULATION_MODES, Accumulation, Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, sizes_to_choose, workload
from hytrain.tools.planner.problem import Floats, PlanProblem
from hytrain.tools.planner.result import OtherMode, Plan, even_split, to_plan
from hytrain.tools.planner.search import CLOSE, PRECISION, search_program
from hytrain.tools.planner.step_program import StepProgram

# How many numbers of rounds, the most promising, are searched for shorter simulated steps.
_MOST_OTHERS = 8
# How many further numbers of micro-batches are tried without a gain.
_WORSE = 3

Solver = Callable[[PlanProblem], "Plan | Infeasible"]
"""Returns a problem's plan."""
RivalSolver = Callable[[PlanProblem, float], "Plan | Infeasible"]
"""Returns a problem's plan; it need not be the best if that is slower than a rival, in seconds."""


def best_mode(problem: PlanProblem, solve: RivalSolver, solve_rounds: Solver) -> Plan | Infeasible:
    """Returns the best plan of stage 3, where all ranks use each layer equally often, in one order.

    ``solve`` is for ranks that go layer by layer, with the best plan of those that do not as its
    rival; ``solve_rounds`` is for ranks that compute one micro-batch after another.
    """
    found: dict[Accumulation, Plan | Infeasible] = {}
    for mode, group in ACCUMULATION_MODES.items():
        policies: tuple[Activations, ...] = tuple(
            policy for policy in problem.activations if policy in group
        )
        if not policies:
            continue
        one = replace(problem, activations=policies)
        if mode == "layer_major":
            rivals = (plan.predicted_seconds for plan in found.values() if isinstance(plan, Plan))
            found[mode] = solve(one, min(rivals, default=math.inf))
        else:
            found[mode] = solve_rounds(one)
    plans = [plan for plan in found.values() if isinstance(plan, Plan)]
    if not plans:
        return _nearest([one for one in found.values() if isinstance(one, Infeasible)])
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    others = [
        OtherMode(mode, other if isinstance(other, Infeasible) else other.predicted_seconds)
        for mode, other in found.items()
        if other is not best
    ]
    return replace(
        best,
        lower_bound=min(plan.lower_bound for plan in plans),
        shortest_step=min(plan.shortest_step for plan in plans),
        other_mode=others[0] if others else None,
    )


def some_rounds(problem: PlanProblem, solve: Solver) -> Plan | Infeasible:
    """Returns the best plan of some numbers of micro-batches, one after another, by policy."""
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


def _nearest(refusals: Sequence[Infeasible]) -> Infeasible:
    """Returns the refusal that comes nearest to fitting."""
    close = [refusal for refusal in refusals if refusal.is_close]
    lacking = [refusal for refusal in refusals if refusal.missing > 0.0]
    if close or not lacking:
        return (close or refusals)[0]
    return min(lacking, key=lambda refusal: refusal.missing)


def _numbers(batch: int) -> Iterator[int]:
    """Yields 1, 2, 3, 4, 6, 8, 12, ...: from 3 on, each is a half or a third more than the last."""
    number = 1
    while number <= batch:
        yield number
        if number > 1 and number * 3 // 2 <= batch:
            yield number * 3 // 2
        number *= 2


def best_rounds(problem: PlanProblem, solve: Solver) -> Plan | Infeasible:
    """Returns the plan of the best number of rounds, with a bound for all numbers.

    ``solve``, for one number of them, is called only if no plan was found, for the reason.
    """
    plans: list[Plan] = []
    bounds: list[float] = []

    def goal() -> float:
        """Returns the seconds above which no steps are searched for."""
        return min((plan.step_seconds for plan in plans), default=math.inf) * (1.0 - PRECISION)

    def look(policy: Activations, rounds: int, worst: float, *, even: bool) -> None:
        one = replace(problem, activations=(policy,), rounds=rounds)
        found = search_program(StepProgram(one, even=even, worst=worst), worst)
        bounds.append(found.bound)
        plans.extend(to_plan(one, best, best.step) for best in found.shortest)

    left = _by_shortest_step(problem)
    for step, even, policy, number in left:
        if step >= goal():
            break
        look(policy, number, goal(), even=even)
    for _, even, policy, number in left[:_MOST_OTHERS]:
        shortest = min((plan.predicted_seconds for plan in plans), default=0.0)
        if shortest <= CLOSE * min([goal(), *bounds]):
            break
        look(policy, number, shortest, even=even)
    # The search ends near the bound: an even split may still be a little shorter.
    if problem.batch % problem.cluster.num_ranks == 0 and (even := even_split(problem)):
        plans.append(even)
    best = min(plans, key=lambda plan: plan.predicted_seconds, default=None)
    best = best or some_rounds(problem, solve)
    if isinstance(best, Infeasible):
        return best
    shortest = min(plan.step_seconds for plan in [best, *plans])
    return replace(best, lower_bound=min(shortest, goal(), *bounds), shortest_step=shortest)


def _by_shortest_step(problem: PlanProblem) -> list[tuple[float, bool, Activations, int]]:
    """Returns (least seconds of a step, even shards, policy, rounds), the shortest first."""
    numbers = candidate_rounds(problem)
    found: list[tuple[float, bool, Activations, int]] = [
        (step, even, policy, number)
        for even in (True, False)[: problem.cluster.num_ranks]
        for policy in problem.activations
        for step, number in zip(
            shortest_steps(problem, policy, numbers, even=even).tolist(), numbers, strict=True
        )
    ]
    return sorted(found, key=lambda one: (one[0], not one[1]))


def candidate_rounds(problem: PlanProblem) -> list[int]:
    """Returns the numbers of rounds that ranks with samples can all make.

    If their micro-batches have M samples together, R rounds have more than (R - 1) M samples and
    up to R M: R is the batch over M, rounded up.
    """
    batch = problem.batch
    largest = sum(_largest(problem, gpu) for _, gpu in problem.cluster.ranks)
    return sorted({-(-batch // together) for together in range(1, min(largest, batch) + 1)})


def _largest(problem: PlanProblem, gpu: GpuProfile) -> int:
    """Returns the samples of the largest micro-batch."""
    return max(sizes_to_choose(replace(problem, rounds=1), gpu, problem.batch))


def shortest_steps(
    problem: PlanProblem, policy: Activations, numbers: Sequence[int], *, even: bool
) -> Floats:
    """Returns the least seconds of a step for each number of rounds, ignoring state.

    In R rounds the ranks' micro-batches must have batch / R samples together. A rank contributes
    as many of them as it has time for, if all its rounds but the last are full.
    """
    collectives = Collectives.of(problem, even=even)
    rounds = np.array(numbers, dtype=np.float64)[:, None]
    times: list[Floats] = []
    least = np.zeros(len(numbers))
    ranks = [gpu for _, gpu in problem.cluster.ranks]
    for gpu in {id(gpu): gpu for gpu in ranks}.values():
        own = _seconds(problem, collectives, gpu, policy)
        if own.shape[1]:
            with np.errstate(invalid="ignore"):
                linear = own[2] + (rounds - 3.0) * (own[3] - own[2])
            seconds = np.where(rounds == 1.0, own[0], np.where(rounds == 2.0, own[1], linear))
            seconds[np.isnan(seconds)] = math.inf
            # A larger micro-batch that takes no longer may replace the smaller one.
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
    problem: PlanProblem, collectives: Collectives, gpu: GpuProfile, policy: Activations
) -> Floats:
    """Returns the seconds of one to four rounds (rows) by size (columns), all but the last full.

    From three on each further round adds the same. Infinite if the GPU has no room.
    """
    columns: list[list[float]] = []
    for size in range(1, _largest(problem, gpu) + 1):
        batches = (size, size + 1, 2 * size + 1, 3 * size + 1)
        works = [workload(problem, gpu, collectives, batch, size, policy) for batch in batches]
        columns.append([work.compute if work.room >= 0.0 else math.inf for work in works])
        if not math.isfinite(min(columns[-1])):
            break  # larger ones leave even less
    return np.array(columns).reshape(-1, 4).T
