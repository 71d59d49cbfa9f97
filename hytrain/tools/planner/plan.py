"""The plan for unequal GPUs with offloaded state: found by bisection, with a bound on the best.

The step's length T is bisected. Whether a T is possible is asked of frontier.py in two readings:
the outer one proves that no plan is faster than ``lower_bound``, the inner one finds loads, for
which allocation.py then finds the shards and whole layers, exactly. So a plan comes with a gap: it
is at most that share longer than the best. Both are worked out for even shards, whose collectives
are faster, and for unequal ones; then rebalance_samples.py moves single samples. The step that the
plan promises is that of step_simulator.py; where it is not close to the bound, plans of fewer
policies are searched as well, local_search.py makes the best of each choice better, and the
shortest promise is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from hytrain.formats.policies import MANNERS, Activations
from hytrain.tools.planner.baselines import best_manner, samples_by_speed
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, Load, fits_rounds, load
from hytrain.tools.planner.frontier import Frontier
from hytrain.tools.planner.infeasibility import missing
from hytrain.tools.planner.local_search import local_search, unevenly
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.rebalance_samples import rebalance_samples
from hytrain.tools.planner.result import TOLERANCE, Found, Plan, settle, to_plan
from hytrain.tools.uneven.solver import Infeasible

# Steps between the bound and the plan that are tried for loads that suit whole layers better.
_RETRIES = 16
# A plan that takes at most so many times the bound by the finer model is not compared with others.
_CLOSE = 1.02
# Otherwise with plans of a step up to so many times as long by the lines, and no more than these.
_NEARBY = 1.25
_MOST_OTHERS = 24
# Of those, so many are refined.
_MOST_REFINED = 6


def make_plan(problem: PlanProblem) -> Plan | Infeasible:
    """The fastest plan found, and a bound on the fastest that there is.

    Args:
        problem: what is to be dealt to whom.
    """
    return _of_one_manner(problem) if problem.needs_rounds else _of_any_manner(problem)


def _if_shorter(problem: PlanProblem, than: float) -> Plan | Infeasible | None:
    """The plan; None where no step is shorter than so many seconds, which one look may tell."""
    if math.isfinite(than):
        free = _of_any_size(problem)
        frontiers = (Frontier(free, even=even, worst=than) for even in (True, False))
        if not any(one.covers(than) and one.choose(than, outer=True) for one in frontiers):
            return None
    return _of_any_manner(problem)


def _of_any_size(problem: PlanProblem) -> PlanProblem:
    """The problem with all micro-batches up to the largest.

    Loads are searched among those that were measured; then single samples are taken from them or
    moved, and any size may come of that.
    """

    def freed(gpu: GpuProfile) -> GpuProfile:
        if gpu.sizes is None:
            return gpu
        most = min(gpu.sizes[-1], gpu.most_samples or gpu.sizes[-1])
        return replace(gpu, sizes=None, most_samples=most)

    hosts = tuple(
        replace(host, gpus=tuple(freed(gpu) for gpu in host.gpus)) for host in problem.cluster.hosts
    )
    return replace(problem, cluster=replace(problem.cluster, hosts=hosts))


def _of_any_manner(problem: PlanProblem) -> Plan | Infeasible:
    """Where each rank may have its own, or where it is decided on."""
    cluster = problem.cluster
    if not problem.allow_idle and problem.batch < cluster.num_ranks:
        return Infeasible(
            f"a batch of {problem.batch} is less than {cluster.num_ranks} ranks, each of which "
            "must compute a sample: raise the batch, or let ranks be idle"
        )
    simple = samples_by_speed(problem)
    if isinstance(simple, Infeasible) or (
        not problem.allow_idle and any(rank.batch_size == 0 for rank in simple.ranks)
    ):
        simple = None
    # Rounded up: it may be the best plan there is.
    worst = math.inf if simple is None else simple.step_seconds * (1.0 + TOLERANCE)
    search = _Search(problem, worst)
    bound = search.bound
    plans = [] if simple is None else [simple]
    if search.trail:
        found = rebalance_samples(problem, min(search.trail, key=lambda each: each.step))
        plans.append(to_plan(problem, found, found.step))
    if not plans:
        return missing(problem, search.frontiers[-1], is_bounded=math.isfinite(bound))
    best = min(plans, key=lambda plan: plan.step_seconds)
    # One of many numbers of rounds is one of many plans already.
    if problem.rounds is None and best.predicted_seconds > _CLOSE * bound:
        plans += _others(problem, search, best)
        best = min(plans, key=lambda plan: plan.predicted_seconds)
    return replace(best, lower_bound=min(bound, *(plan.step_seconds for plan in plans)))


def _others(problem: PlanProblem, search: _Search, best: Plan) -> list[Plan]:
    """Plans whose steps the finer model may find shorter than that of the best by the lines.

    Those that the search has come by, and the best ones of fewer policies: the lines do not know
    when in a step a rank's gradients come, by which the policies differ.
    """
    most = _NEARBY * best.step_seconds
    trail = list(search.trail)
    for policies in _choices(problem.activations):
        own = replace(problem, activations=policies)
        found = _Search(own, most).trail
        trail += found
        if found:
            trail.append(rebalance_samples(own, min(found, key=lambda each: each.step)))
    distinct = {(one.loads, one.shares): one for one in trail if one.step <= most}
    nearest = sorted(distinct.values(), key=lambda one: one.step)[:_MOST_OTHERS]
    plans = [(to_plan(problem, one, one.step), one) for one in nearest]
    plans.sort(key=lambda pair: pair[0].predicted_seconds)
    # Small changes lead from one choice of policies to another seldom: the best of each is refined.
    starts: dict[tuple[Activations, ...], Found] = {}
    for plan, one in plans:
        starts.setdefault(tuple(rank.activations for rank in plan.ranks), one)
    first = list(starts.values())[:_MOST_REFINED]
    first += [unevenly(problem, one) for one in first if one.even and len(one.loads) > 1]
    refined = [local_search(problem, one) for one in first]
    return [
        *(plan for plan, _ in plans),
        *(to_plan(problem, found, found.step) for found in refined),
    ]


def _choices(activations: tuple[Activations, ...]) -> list[tuple[Activations, ...]]:
    """Each policy alone, and those of each manner of accumulation."""
    groups: list[tuple[Activations, ...]] = [(policy,) for policy in activations]
    for own in MANNERS.values():
        groups.append(tuple(policy for policy in activations if policy in own))
    return [group for group in dict.fromkeys(groups) if group and group != activations]


class _Search:
    """The search for the shortest step by the lines.

    Attributes:
        frontiers: of even shards, and of unequal ones where there are several ranks.
        bound: no step is shorter; infinite where none is possible.
        trail: the plans that it has come by.
    """

    def __init__(self, problem: PlanProblem, worst: float) -> None:
        """
        Args:
            problem: what is to be dealt to whom.
            worst: seconds of a step; longer ones are of no interest.
        """
        self.frontiers = [Frontier(problem, even=True, worst=worst)]
        if problem.cluster.num_ranks > 1:
            self.frontiers.append(Frontier(problem, even=False, worst=worst))
        self.bound = math.inf
        self.trail: list[Found] = []
        for frontier in self.frontiers:
            possible = _lower_bound(frontier)
            if possible is None:
                continue
            self.bound = min(self.bound, possible)
            shortest = min((one.step for one in self.trail), default=math.inf)
            self.trail += _search(frontier, possible, shortest)


def _of_one_manner(problem: PlanProblem) -> Plan | Infeasible:
    """Stage 3: the best plan in which all ranks use each layer together."""
    found = best_manner(problem, _if_shorter)
    if isinstance(found, Infeasible):
        return found
    # Ranks that need not wait for each other are no slower: their bound is all plans' bound.
    bounds: list[float] = [found.step_seconds]
    worst = found.step_seconds * (1.0 + TOLERANCE)
    for group in MANNERS.values():
        policies: tuple[Activations, ...] = tuple(
            policy for policy in problem.activations if policy in group
        )
        if policies:
            free = replace(problem, activations=policies)
            frontiers = (Frontier(free, even=even, worst=worst) for even in (True, False))
            both = (_lower_bound(frontier) for frontier in frontiers)
            bounds += [bound for bound in both if bound is not None]
    return replace(found, lower_bound=min(bounds))


def _lower_bound(frontier: Frontier) -> float | None:
    """The longest step that is proven impossible; None where every step is."""
    longest = frontier.longest()
    if not frontier.covers(longest):
        return None
    low, high = _bisect(frontier.covers, 0.0, longest)
    growth = TOLERANCE
    while frontier.choose(high, outer=True) is None:
        if high >= longest:
            return None
        low, high = high, min(high * (1.0 + growth), longest)
        growth *= 2.0
    return _bisect(lambda step: frontier.choose(step, outer=True) is not None, low, high)[0]


def _bisect(able: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Where it becomes able, to the tolerance; it is at ``high``."""
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if able(middle) else (middle, high)
    return low, high


def _search(frontier: Frontier, low: float, worst: float) -> list[Found]:
    """Plans by the inner reading, the fastest among them; none where all are slower than ``worst``.

    Args:
        frontier: what can be held in which time.
        low: no step is shorter.
        worst: seconds of a step.
    """
    longest = min(frontier.longest(), worst)
    growth = TOLERANCE
    while True:  # gallop up from the bound: the best is close to it
        high = min(low * (1.0 + growth), longest)
        first = _finish(frontier, high)
        if first is not None or high >= longest:
            break
        growth *= 2.0
    if first is None:
        return []
    trail = [first]
    low = max(low, low * (1.0 + growth / 2.0)) if growth > TOLERANCE else low
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2.0
        better = _finish(frontier, middle)
        if better is None:
            low = middle
        else:
            high = middle
            trail.append(better)
    # Loads chosen for a longer step may take whole layers better.
    for number in range(1, _RETRIES):
        shortest = min(one.step for one in trail)
        longer = low * (shortest / low) ** (number / _RETRIES)
        other = _finish(frontier, longer) if longer > high else None
        trail += [] if other is None else [other]
    return trail


def _finish(frontier: Frontier, step: float) -> Found | None:
    """Loads that fit a step by the inner reading, with shares; the step may come out longer."""
    chosen = frontier.choose(step, outer=False)
    loads = None if chosen is None else _deal(frontier, chosen)
    if loads is None:
        return None
    return settle(frontier.problem, loads, step, even=frontier.even)


def _deal(frontier: Frontier, chosen: Sequence[Load]) -> list[Load] | None:
    """The loads with samples taken from the slowest until they are the batch.

    None where that would leave a rank with another number of micro-batches than all shall have.
    """
    problem = frontier.problem
    collectives = Collectives.of(problem, even=frontier.even)
    batches = [work.batch for work in chosen]
    sizes = [work.microbatch for work in chosen]
    least = 0 if problem.allow_idle else 1
    for _ in range(sum(batches) - problem.batch):
        fewer = [
            _micro_size(problem, batch - 1, size) if batch > least else None
            for batch, size in zip(batches, sizes, strict=True)
        ]
        able = [rank for rank, size in enumerate(fewer) if size is not None]
        if not able:
            return None
        slowest = max(
            able, key=lambda rank: chosen[rank].compute * batches[rank] / chosen[rank].batch
        )
        batches[slowest] -= 1
        sizes[slowest] = fewer[slowest] or 0
    dealt: list[Load] = []
    rows = zip(problem.cluster.ranks, chosen, batches, sizes, strict=True)
    for (_, gpu), work, batch, size in rows:
        if batch == work.batch:
            dealt.append(work)
            continue
        dealt.append(load(problem, gpu, collectives, batch, size, work.activations))
    return dealt


def _micro_size(problem: PlanProblem, batch: int, most: int) -> int | None:
    """The largest micro-batch, up to ``most``, that makes the rounds; None where none does."""
    if not batch:
        return 0
    sizes = range(min(most, batch), 0, -1)
    return next((size for size in sizes if fits_rounds(problem, batch, size)), None)
