"""Recorded runs on unequal GPUs beside their plans: steps and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.common.records import GIB, read_json
from experiments.unequal_gpus import planning
from experiments.unequal_gpus.cases import OFFLOAD
from hytrain.formats.policies import ACTIVATIONS, LAYER_MAJOR, Activations
from hytrain.formats.profile_file import ProfileFile
from hytrain.tools.planner import plan as plan_module
from hytrain.tools.planner.cost_model import Collectives, gpu_bytes, workload
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Plan

# -- what was recorded (recorded_runs.json says where) -----------------------------------------

_DATA = read_json(Path(__file__).with_name("recorded_runs.json"))


class Trained(NamedTuple):
    """What a rank of a run was given, and what it had allocated at most."""

    rank: int
    samples: int
    micro_batch: int
    shard_fraction: float
    activations: Any
    gpu_fraction: float
    peak_bytes: int


class Case(NamedTuple):
    """A profile, a global batch, and the ranks that were trained with them."""

    name: str
    profile: ProfileFile
    batch: int
    ranks: list[Trained]


def profile(name: str) -> ProfileFile:
    """A recorded profile."""
    return ProfileFile.model_validate(_DATA["profiles"][name])


def cases() -> list[Case]:
    """All cases in which something was trained."""
    return [
        Case(
            each["id"],
            profile(each["profile"]),
            each["batch"],
            [Trained(*r) for r in each["ranks"]],
        )
        for each in _DATA["cases"]
    ]


# -- plans from profiles that were recorded on H200s -------------------------------------------

PROFILES = (pytest.param("offload_run_5", marks=pytest.mark.parity_full), "offload_run_7")
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
    whole = offload_problem("offload_run_7")
    (host,) = whole.cluster.hosts
    less = replace(host, memory_bytes=int(0.95 * host.memory_bytes))
    problem = replace(whole, cluster=replace(whole.cluster, hosts=(less,)))
    refined = seconds(problem)
    monkeypatch.setattr(plan_module, "local_search", keep_found)
    assert seconds(problem) > 1.01 * refined, "there is nothing to gain in this case"


# -- memory that H200s had allocated at most ----------------------------------------------------

WHOLE = planning.Limits(host_bytes=None)
CASES = cases()


def ratios(case: Case) -> Iterator[tuple[int, float]]:
    """(samples, what is predicted over what was allocated) of every rank that trained."""
    problem = planning.problem_of(case.profile, case.batch, WHOLE)
    for rank in case.ranks:
        gpu = problem.cluster.ranks[rank.rank][1]
        alone = Collectives(0.0, 0.0)
        work = workload(problem, gpu, alone, rank.samples, rank.micro_batch, rank.activations)
        shard = rank.shard_fraction * problem.model.parameters
        on_gpu = rank.gpu_fraction * shard
        predicted = gpu_bytes(problem, gpu, work, on_gpu, shard - on_gpu)
        yield rank.samples, predicted / rank.peak_bytes


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_recorded_peaks(case: Case) -> None:
    found = list(ratios(case))
    computing = [ratio for samples, ratio in found if samples]
    assert computing
    # Up to run 8's second, a micro-batch's logits stayed through its backward, unplanned.
    assert min(computing) > 0.995
    assert max(computing) < 1.025
    # A rank that computes nothing still updates a shard. One is recorded, whose allocator was at
    # its limit: 3.7 % of what it took is not predicted; the cause is unknown.
    idle = [ratio for samples, ratio in found if not samples]
    assert all(0.96 < ratio < 1.025 for ratio in idle)


def test_what_the_readme_counts() -> None:
    """Ranks that compute samples, and those that do not, of all recorded cases."""
    samples = [rank.samples for case in CASES for rank in case.ranks]
    assert sum(count > 0 for count in samples) == 149
    assert sum(count == 0 for count in samples) == 1
