"""Plans made better: never worse, and the best there is where only samples matter."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from planner_clusters import plan_problems

from hytrain.tools.planner import plan as plan_module
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, load
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.local_search import local_search
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.rebalance_samples import rebalance_samples
from hytrain.tools.planner.result import Found, Plan, to_plan

PARAMETERS = 3 * 10**9
FREE = Table(((1.0, 0.0),))


def device(name: str, launch: float, ms: float, most: int) -> GpuProfile:
    """A micro-batch of n samples takes ``launch + n * ms`` forward, twice ``ms`` a sample back."""
    return GpuProfile(
        name=name,
        memory_bytes=10**15,
        forward_ms=Table(tuple((float(n), launch + ms * n) for n in (1, 2, 8, 24))),
        backward_ms=Table(((1.0, 2.0 * ms),)),
        peak_bytes=Table(((1.0, 1e9),)),
        idle_bytes=0,
        update_rate=1e15,
        copy_rate=2e10,
        most_samples=most,
    )


def only_samples_matter(seed: int) -> PlanProblem:
    """Two GPUs with room for everything, and a batch that is dealt in whole micro-batches first."""
    draw = random.Random(seed)
    launch, most = draw.uniform(0.0, 5.0), draw.randint(2, 24)
    gpus = tuple(device(name, launch, draw.uniform(0.5, 4.0), most) for name in "ab")
    host = Host("host", gpus, 16, 10**15, 1e11, Table(((16.0, 4e9),)))
    return PlanProblem(
        Cluster((host,), FREE, FREE),
        Model("m", 24, PARAMETERS, 4 * 2**20),
        draw.randint(65, 200),
        activations=("keep",),
    )


def best_of_all(problem: PlanProblem) -> float:
    """The shortest step of all ways to deal the samples, each with its fastest micro-batch."""
    none = Collectives(0.0, 0.0)

    def fastest(gpu: GpuProfile, samples: int) -> float:
        works = (
            load(problem, gpu, none, samples, size, "keep") for size in gpu.micro_sizes(samples)
        )
        return min((work.compute for work in works), default=0.0)

    first, second = (gpu for _, gpu in problem.cluster.ranks)
    return min(
        max(fastest(first, samples), fastest(second, problem.batch - samples))
        for samples in range(problem.batch + 1)
    )


def step(problem: PlanProblem) -> float:
    plan = make_plan(problem)
    assert isinstance(plan, Plan)
    assert sum(rank.batch_size for rank in plan.ranks) == problem.batch
    return plan.step_seconds


def test_it_finds_the_best_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [only_samples_matter(seed) for seed in range(40)]
    best = [best_of_all(problem) for problem in problems]
    polished = [step(problem) / least for problem, least in zip(problems, best, strict=True)]
    assert max(polished) < 1.0 + 1e-4
    monkeypatch.setattr(plan_module, "rebalance_samples", lambda _problem, found: found)
    raw = [step(problem) / least for problem, least in zip(problems, best, strict=True)]
    assert max(raw) < 1.0 + 1e-4, "the program finds it by itself"


def _changes(
    problem: PlanProblem, change: Callable[[PlanProblem, Found], Found]
) -> list[tuple[Found, Found]]:
    """What a part of the planner was given and gave back while a plan was made."""
    seen: list[tuple[Found, Found]] = []

    def watch(given: PlanProblem, found: Found) -> Found:
        better = change(given, found)
        seen.append((found, better))
        return better

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, change.__name__, watch)
        make_plan(problem)
    return seen


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_problem=plan_problems(most_ranks=3, most_batch=12))
def test_never_worse(random_problem: PlanProblem) -> None:
    for before, after in _changes(random_problem, rebalance_samples):
        assert after.step <= before.step
        assert after.even == before.even
        assert sum(work.batch for work in after.loads) == random_problem.batch
        assert all(work.room >= 0.0 for work in after.loads)
        least = 0 if random_problem.allow_idle else 1
        assert all(work.batch >= least for work in after.loads)
        assert [w.activations for w in after.loads] == [w.activations for w in before.loads]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_problem=plan_problems(most_ranks=3, most_batch=8))
def test_refined_plans_are_faster_and_keep_to_all_limits(random_problem: PlanProblem) -> None:
    for before, after in _changes(random_problem, local_search):
        plans = [to_plan(random_problem, found, found.step) for found in (before, after)]
        walked = [
            max(found.step, _walked(random_problem, found).seconds()) for found in (before, after)
        ]
        assert walked[1] <= walked[0]
        assert after.even == before.even
        assert sum(rank.batch_size for rank in plans[1].ranks) == random_problem.batch
        assert sum(rank.shard_fraction for rank in plans[1].ranks) == pytest.approx(1.0)
        by_host: dict[str, float] = {}
        for rank, (host, gpu) in zip(plans[1].ranks, random_problem.cluster.ranks, strict=True):
            assert rank.batch_size >= (0 if random_problem.allow_idle else 1)
            assert rank.shard_fraction >= 0.0
            assert rank.gpu_bytes <= gpu.memory_bytes * (1.0 + 1e-9)
            by_host[host.name] = by_host.get(host.name, 0.0) + rank.host_bytes
        for host in random_problem.cluster.hosts:
            assert by_host[host.name] <= host.memory_bytes * (1.0 + 1e-9) + 1.0


def _walked(problem: PlanProblem, found: Found) -> PlannedStep:
    return PlannedStep(problem, found.loads, found.shares, even=found.even)
