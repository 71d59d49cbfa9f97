"""Stage 3: all ranks go layer by layer, or one micro-batch after another, as often."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hytrain.formats.policies import ACCUMULATION_MODES, Accumulation, Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import OtherMode, Plan

Solver = Callable[[PlanProblem], "Plan | Infeasible"]
"""Gives a problem's plan."""
RivalSolver = Callable[[PlanProblem, float], "Plan | Infeasible"]
"""Gives a problem's plan, not the best one where that is longer than a rival of so many seconds."""

# So many further numbers of micro-batches are tried without a gain.
_WORSE = 3


def best_mode(problem: PlanProblem, solve: RivalSolver, solve_rounds: Solver) -> Plan | Infeasible:
    """The best solution of stage 3, where all ranks use each layer as often, in the same order.

    Args:
        problem: what is to be dealt to whom.
        solve: for ranks that go layer by layer; the rival is the best plan of those that do not.
        solve_rounds: for ranks that compute one micro-batch after another.
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
