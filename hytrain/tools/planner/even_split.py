"""What a plan is compared with: the best step of ranks that are all treated alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hytrain.formats.policies import LAYER_MAJOR
from hytrain.tools.planner.cost_model import Collectives, WorkloadMaker
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Found, Plan, settle, to_plan


def even_split(problem: PlanProblem) -> Plan | None:
    """All ranks compute equally many samples, equally many at once, and own equally much.

    Of all micro-batches, policies and numbers of GPU layers the best; None where none fits. What
    of the batch cannot be divided is left out.
    """
    number = problem.cluster.num_ranks
    best: tuple[PlanProblem, Found] | None = None
    batch = problem.batch // number
    problem = replace(problem, batch=number * batch)
    collectives = Collectives.of(problem, even=True)
    gpus = [gpu for _, gpu in problem.cluster.ranks]
    common = set.intersection(*(set(gpu.micro_batches(batch)) for gpu in gpus))
    for policy, size in product(problem.activations, sorted(common)):
        # What stage 3 keeps and fetches depends on the number of micro-batches.
        rounds = -(-batch // size) if problem.needs_rounds and policy not in LAYER_MAJOR else None
        one = replace(problem, rounds=rounds or problem.rounds)
        make = WorkloadMaker(one, collectives)
        works = [make.of(gpu, batch, size, policy) for gpu in gpus]
        found = settle(one, works, max(work.compute for work in works), even=True)
        if found is not None and (best is None or found.step < best[1].step):
            best = one, found
    return None if best is None else to_plan(*best, best[1].step)
