"""The plan for unequal GPUs with offloaded state: a bound and plans near it, then local search.

search.py finds the shortest step by the roofline bounds of cost_model.py for even shards, whose
collectives are faster, and for unequal ones, and proves that no plan is faster than
``lower_bound``. So a plan comes with a gap: it is at most that share longer than the best. The step
that it predicts is simulated (planned_step.py); if that is not close to the bound, plans with fewer
policies are searched as well, and local_search.py improves the best of each choice. If all ranks
must make equally many micro-batches (stage 3), micro_batch_counts.py finds how many.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hytrain.formats.policies import ACCUMULATION_MODES, LAYER_MAJOR, Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.infeasibility import missing
from hytrain.tools.planner.local_search import local_search, unevenly
from hytrain.tools.planner.micro_batch_counts import best_mode, best_rounds
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Found, OtherMode, Plan, even_split, to_plan
from hytrain.tools.planner.search import CLOSE, Search, longer, search

# A plan that is not within CLOSE of the bound is compared with plans whose step by the roofline
# bounds is up to _NEARBY times as long. At most _MOST_SIMULATED of them are simulated, and at most
# _MOST_REFINED refined, those with even shards also with unequal ones.
_NEARBY = 1.25
_MOST_SIMULATED = 24
_MOST_REFINED = 6


def make_plan(problem: PlanProblem) -> Plan | Infeasible:
    """Returns the fastest plan found, with a bound on the fastest possible one."""
    if problem.sequence_ranks > 1:
        short = "no equal parts fit: `hytrain explain` with --ranks and --seq says what is missing"
        return even_split(problem) or Infeasible(short)
    if problem.needs_rounds:
        return best_mode(problem, _of_any_mode, lambda one: best_rounds(one, _of_any_mode))
    return _of_any_mode(problem)


def make_plan_without_spare(problem: PlanProblem) -> tuple[PlanProblem, Plan | Infeasible]:
    """Returns the plan; if none fits in stage 3, one whose first backward keeps no gradients.

    The latter has one micro-batch after another: layer by layer, the first step may be a trial,
    which keeps them.

    Returns:
        The problem that was planned, and its plan; if nothing fits, the problem that lacks less
        memory, and why.
    """
    plan = make_plan(problem)
    policies = tuple(policy for policy in problem.activations if policy not in LAYER_MAJOR)
    if not isinstance(plan, Infeasible) or problem.stage != 3 or not policies:
        return problem, plan
    # A single rank whose number of micro-batches is not searched has room for only one.
    rounds = problem.rounds or (None if problem.needs_rounds else 1)
    other = replace(problem, activations=policies, keeps_gradients=False, rounds=rounds)
    found = make_plan(other)
    if isinstance(found, Infeasible) and found.missing >= plan.missing:
        return problem, plan
    return other, found


def beside_micro_batch_major(problem: PlanProblem, plan: Plan) -> Plan:
    """Adds the step of the best micro-batch-major plan to a plan with a layer-major rank."""
    policies = tuple(policy for policy in problem.activations if policy not in LAYER_MAJOR)
    if not policies:
        return plan
    found = make_plan(replace(problem, activations=policies))
    result = found if isinstance(found, Infeasible) else found.predicted_seconds
    return replace(plan, other_mode=OtherMode("micro_batch_major", result))


def _of_any_mode(problem: PlanProblem, rival: float = math.inf) -> Plan | Infeasible:
    """Plans for ranks that may each have their own accumulation mode, or whose mode is decided.

    A plan that cannot be as fast as ``rival`` seconds is not refined.
    """
    cluster = problem.cluster
    if not problem.allow_idle and problem.batch < cluster.num_ranks:
        return Infeasible(
            f"a batch of {problem.batch} is less than {cluster.num_ranks} ranks, each of which "
            "must compute a sample: raise the batch, or let ranks be idle"
        )
    found = search(problem)
    plans = [to_plan(problem, one, one.step) for one in found.shortest]
    if not plans:
        return missing(problem, is_bounded=math.isfinite(found.bound))
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    # A given number of rounds is one of many that the caller compares.
    is_one_of_many = problem.rounds is not None or found.bound > rival
    if not is_one_of_many and best.predicted_seconds > CLOSE * found.bound:
        plans += _refined(problem, found, min(plan.step_seconds for plan in plans))
        best = min(plans, key=lambda plan: plan.predicted_seconds)
    shortest = min(plan.step_seconds for plan in plans)
    return replace(best, lower_bound=min(found.bound, shortest), shortest_step=shortest)


def _refined(problem: PlanProblem, found: Search, step: float) -> list[Plan]:
    """Returns plans whose simulated steps may be shorter than that of the best by the bounds.

    The roofline bounds do not know when in a step a rank's gradients come, and in that the policies
    differ. Small changes seldom lead from one choice of policies to another: the best of each is
    refined.
    """
    trail = [*found.trail, *longer(problem, step)]
    for policies in _choices(problem.activations):
        trail += search(replace(problem, activations=policies), _NEARBY * step).trail
    distinct = {(one.workloads, one.shares): one for one in trail if one.step <= _NEARBY * step}
    nearest = sorted(distinct.values(), key=lambda one: one.step)[:_MOST_SIMULATED]
    plans = [(to_plan(problem, one, one.step), one) for one in nearest]
    plans.sort(key=lambda pair: pair[0].predicted_seconds)
    starts: dict[tuple[Activations, ...], Found] = {}
    for _, one in plans:
        starts.setdefault(tuple(work.activations for work in one.workloads), one)
    first = list(starts.values())[:_MOST_REFINED]
    first += [unevenly(problem, one) for one in first if one.even and len(one.workloads) > 1]
    refined = [local_search(problem, one) for one in first]
    return [*(plan for plan, _ in plans), *(to_plan(problem, one, one.step) for one in refined)]


def _choices(activations: tuple[Activations, ...]) -> list[tuple[Activations, ...]]:
    """Returns each policy alone, and the policies of each accumulation mode."""
    groups: list[tuple[Activations, ...]] = [(policy,) for policy in activations]
    for own in ACCUMULATION_MODES.values():
        groups.append(tuple(policy for policy in activations if policy in own))
    return [group for group in dict.fromkeys(groups) if group and group != activations]
