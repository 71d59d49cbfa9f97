"""What H200s had allocated at most in recorded runs is what the planner's memory model says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from recorded_runs import Case, cases

from experiments.unequal_gpus import planning
from hytrain.tools.planner.cost_model import Collectives, gpu_bytes, workload

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
