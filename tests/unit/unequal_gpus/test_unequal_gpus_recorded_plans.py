"""Plans from profiles that were recorded on H200s: more choice and more memory make none slower."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from recorded_runs import profile

from experiments.common.records import GIB
from experiments.unequal_gpus import planning
from experiments.unequal_gpus.cases import OFFLOAD
from hytrain.formats.policies import ACTIVATIONS, LAYER_MAJOR, Activations
from hytrain.tools.planner import plan as plan_module
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Plan

PROFILES = ("offload_run_5", "offload_run_7")
assert OFFLOAD.host_gib is not None
LIMITS = planning.Limits(host_bytes=int(OFFLOAD.host_gib * GIB))


@cache
def offload_problem(name: str) -> PlanProblem:
    """Case offload, whose CPUs have much to update."""
    return planning.problem_of(profile(name), OFFLOAD.batch, LIMITS)


def seconds(problem: PlanProblem) -> float:
    plan = make_plan(problem)
    assert isinstance(plan, Plan), plan
    assert plan.lower_bound <= plan.predicted_seconds
    (host,) = problem.cluster.hosts
    assert sum(rank.host_bytes for rank in plan.ranks) <= host.memory_bytes
    for rank, gpu in zip(plan.ranks, host.gpus, strict=True):
        assert rank.gpu_bytes <= gpu.memory_bytes
    return plan.predicted_seconds


@pytest.mark.parametrize("name", PROFILES)
def test_more_policies_make_no_slower_plan(name: str) -> None:
    problem = offload_problem(name)
    assert problem.activations == ACTIVATIONS
    fewer: list[tuple[Activations, ...]] = [("store",), ("store", "recompute"), LAYER_MAJOR]
    alone = [seconds(replace(problem, activations=policies)) for policies in fewer]
    assert seconds(problem) <= min(alone) * (1.0 + 1e-6)
    # Only to store them has memory for one sample at a time there.
    assert seconds(problem) < 0.7 * alone[0]


@pytest.mark.parametrize("name", PROFILES)
def test_more_memory_makes_no_slower_plan(name: str) -> None:
    """Within a percent: not every plan is tried."""
    problem = offload_problem(name)
    (host,) = problem.cluster.hosts
    grown = tuple(replace(gpu, memory_bytes=gpu.memory_bytes + 3 * GIB) for gpu in host.gpus)
    grown_host = replace(host, gpus=grown, memory_bytes=host.memory_bytes + 3 * GIB)
    cluster = replace(problem.cluster, hosts=(grown_host,))
    assert seconds(replace(problem, cluster=cluster)) <= seconds(problem) * 1.01


def keep_found(problem: PlanProblem, found: object) -> object:
    """In place of the finer model."""
    del problem
    return found


def test_the_finer_model_finds_faster_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = offload_problem(PROFILES[1])
    refined = seconds(problem)
    monkeypatch.setattr(plan_module, "local_search", keep_found)
    assert seconds(problem) > 1.02 * refined, "there is nothing to gain in this case"
