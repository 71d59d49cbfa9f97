"""What H200s had allocated at most in recorded runs is what the planner's memory model says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.common.records import OK, read_json
from experiments.unequal_gpus import planning
from hytrain.planner.loads import Collectives, gpu_bytes, load
from hytrain.planner.problem import PlanProblem

RESULTS = Path(__file__).parents[3] / "experiments" / "unequal_gpus" / "results"
WHOLE = planning.Limits(host_bytes=None)


def recorded_cases() -> Iterator[Any]:
    """Cases whose ranks were profiled and planned for."""
    for path in sorted(RESULTS.glob("*/results.json")):
        for run in read_json(path)["runs"]:
            for number, case in enumerate(run["cases"]):
                ended = {name for name, each in case["results"].items() if each["status"] == OK}
                if ended > {"profile", "plan"}:  # something was trained, too
                    name = f"{path.parent.name}-{case['case']['label']}-{number}"
                    yield pytest.param(case, id=name)


def work_of(case: Any, run: str, rank: int, trained: Any) -> tuple[int, int, float, Any] | None:
    """(samples, of them at once, shard of the state, activations) of a rank; None: not of these."""
    if run == "alone":
        batch = trained["micro_batch"] * trained["accumulation"]
        return batch, trained["micro_batch"], 1.0, "store"
    plan = case["results"]["plan"]["ranks"][0].get("even" if run == "even" else "planned")
    if plan is None or run not in ("planned", "in_stream", "in_kernels", "even"):
        return None
    shards = plan.get("shard_fractions") or [1 / len(plan["batch_sizes"])] * 8
    policies = plan.get("activations") or ["store"] * len(plan["batch_sizes"])
    return plan["batch_sizes"][rank], plan["micro_batch_sizes"][rank], shards[rank], policies[rank]


def ratios(case: Any, problem: PlanProblem) -> Iterator[tuple[int, float]]:
    """(samples, what is said over what was allocated) of every rank that trained."""
    for run, result in case["results"].items():
        if result["status"] != OK:
            continue
        for rank, trained in enumerate(result["ranks"]):
            found = work_of(case, run.partition("#")[0], rank, trained)
            if found is None:
                continue
            batch, microbatch, fraction, policy = found
            gpu = problem.cluster.ranks[rank][1]
            work = load(problem, gpu, Collectives(0.0, 0.0), batch, microbatch, policy)
            shard = fraction * problem.model.parameters
            on_gpu = trained["gpu_fraction"] * shard
            said = gpu_bytes(problem, gpu, work, on_gpu, shard - on_gpu)
            yield batch, said / trained["gpu"]["peak_allocated_bytes"]


@pytest.mark.parametrize("case", list(recorded_cases()))
def test_recorded_peaks(case: Any) -> None:
    profile = planning.file_of(case["results"]["profile"]["ranks"])
    problem = planning.problem_of(profile, case["case"]["batch"], WHOLE)
    found = list(ratios(case, problem))
    computing = [ratio for samples, ratio in found if samples]
    assert computing
    # Up to run 8's second, a micro-batch's logits stayed through its backward, unplanned.
    assert min(computing) > 0.995
    assert max(computing) < 1.025
    # A rank that computes nothing still updates a shard. One is recorded, whose allocator was at
    # its limit: 3.7 % of what it took is not said, and nobody has looked into why.
    idle = [ratio for samples, ratio in found if not samples]
    assert all(0.96 < ratio < 1.025 for ratio in idle)


def test_what_the_readme_counts() -> None:
    """Ranks that compute samples, and those that do not, of all recorded cases."""
    counts = {True: 0, False: 0}
    for parameters in recorded_cases():
        (case,) = parameters.values
        profile = planning.file_of(case["results"]["profile"]["ranks"])
        problem = planning.problem_of(profile, case["case"]["batch"], WHOLE)
        for samples, _ in ratios(case, problem):
            counts[samples > 0] += 1
    assert counts == {True: 149, False: 1}
