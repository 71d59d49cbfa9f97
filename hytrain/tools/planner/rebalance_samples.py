"""A plan made a little better by moving single samples.

With large batches the search deals whole micro-batches and takes what is too much from the slowest
ranks, so a rank may be left with an awkward last micro-batch while another has room for a sample
more. Here the slowest rank gives as many samples as make it faster, each to the rank that has the
shortest step with it, and every rank uses its fastest micro-batch for what it has; that is repeated
while the step becomes shorter.
"""

from __future__ import annotations

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, Load, fits_rounds, load, sizes_to_choose
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import TOLERANCE, Found, settle

_MOST_MOVES = 64


def rebalance_samples(problem: PlanProblem, found: Found) -> Found:
    """The plan, or a faster one with the same shards' kind and activation policies.

    Args:
        problem: what is dealt.
        found: a plan for it.
    """
    loads = FastestLoads(problem, even=found.even)
    for _ in range(_MOST_MOVES):
        moved = _move(problem, loads, found.loads)
        if moved is None:
            break
        least = max(work.compute for work in moved)
        if least >= found.step * (1.0 - TOLERANCE):
            break
        better = settle(problem, moved, least, even=found.even)
        if better is None or better.step >= found.step * (1.0 - TOLERANCE):
            break
        found = better
    return found


class FastestLoads:
    """The fastest load for so many samples, each worked out once."""

    def __init__(self, problem: PlanProblem, *, even: bool) -> None:
        """
        Args:
            problem: what is dealt.
            even: whether all shards are equal.
        """
        self._problem = problem
        self._collectives = Collectives.of(problem, even=even)
        # By the profile's identity: to compare profiles takes long.
        self._known: dict[tuple[int, int, Activations], Load | None] = {}

    def of(self, gpu: GpuProfile, batch: int, policy: Activations) -> Load | None:
        """None where no micro-batch leaves room on the GPU or makes the rounds."""
        key = id(gpu), batch, policy
        if key not in self._known:
            sizes = sizes_to_choose(self._problem, gpu, batch) if batch else (0,)
            made = (self.of_size(gpu, batch, size, policy) for size in sizes)
            roomy = (work for work in made if work is not None)
            self._known[key] = min(roomy, key=lambda work: work.compute, default=None)
        return self._known[key]

    def of_size(
        self, gpu: GpuProfile, batch: int, microbatch: int, policy: Activations
    ) -> Load | None:
        """With these micro-batches; None where they leave no room or do not make the rounds."""
        if not fits_rounds(self._problem, batch, microbatch):
            return None
        work = load(self._problem, gpu, self._collectives, batch, microbatch, policy)
        return work if work.room >= 0.0 else None


def _move(problem: PlanProblem, loads: FastestLoads, chosen: tuple[Load, ...]) -> list[Load] | None:
    """The loads after one move; None where the slowest rank has none to give."""
    moved = list(chosen)
    gpus = [gpu for _, gpu in problem.cluster.ranks]
    slowest = max(range(len(moved)), key=lambda rank: moved[rank].compute)
    work = moved[slowest]
    least = 0 if problem.allow_idle else 1
    for batch in range(work.batch, least - 1, -1):
        faster = loads.of(gpus[slowest], batch, work.activations)
        if faster is not None and faster.compute < work.compute * (1.0 - TOLERANCE):
            moved[slowest] = faster
            break
    else:
        return None
    for _ in range(work.batch - moved[slowest].batch):
        given = [
            (with_more.compute, rank, with_more)
            for rank, other in enumerate(moved)
            if rank != slowest
            and (with_more := loads.of(gpus[rank], other.batch + 1, other.activations))
        ]
        if not given:
            return None
        _, rank, taken = min(given, key=lambda row: row[:2])
        moved[rank] = taken
    return moved
