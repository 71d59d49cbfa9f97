"""A plan: what each rank does, what that is predicted to take, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from hytrain.formats.moment_kinds import MASTER_BYTES, SPLIT_BYTES
from hytrain.formats.plan_file import VERSION, PlanFile, PlannedModel, PlannedRank, Predicted
from hytrain.formats.policies import LAYER_MAJOR, Accumulation
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.allocation import Share, allocate
from hytrain.tools.planner.cost_model import (
    Collectives,
    Workload,
    WorkloadMaker,
    gpu_bytes,
    gpu_layers_that_fit,
    host_bytes,
    longest_step,
    roofline,
    traffic,
)
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import PlanProblem

TOLERANCE = 1e-4
"""Bisection ends when the step is known to within this share."""
# If fetching weights from the host takes more than this share of a step, it limits the step.
_NOTABLE = 0.05


@dataclass(frozen=True, slots=True)
class OtherMode:
    """What the best plan of the accumulation mode that was not chosen takes (stage 3).

    Attributes:
        accumulation: that mode.
        result: its predicted step in seconds, or why nothing fits.
    """

    accumulation: Accumulation
    result: float | Infeasible


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan and how good it is.

    Attributes:
        ranks: in rank order.
        step_seconds: the step by the roofline bounds of cost_model.py.
        lower_bound: no plan has a shorter step by these bounds, which are for unclipped steps.
        shortest_step: the shortest step by these bounds of all plans that were compared. Less than
            ``step_seconds`` if another plan is faster by the bounds but slower when simulated.
        even: whether all shards are equal.
        unclipped_seconds: a step that is not clipped, simulated (planned_step.py).
        clipped_seconds: a step that is clipped, simulated.
        late_layers: for each rank, how many of its CPU layers are updated when the step's outcome
            is known: their master weights are split on the CPU as well.
        other_mode: the mode it was chosen over; None if there was no choice, or each rank has its
            own mode.
    """

    ranks: tuple[PlannedRank, ...]
    step_seconds: float
    lower_bound: float
    shortest_step: float
    even: bool
    unclipped_seconds: float
    clipped_seconds: float
    clipped_share: float
    late_layers: tuple[int, ...] = ()
    other_mode: OtherMode | None = None

    @property
    def accumulation(self) -> Accumulation | None:
        """The mode of all ranks with samples; None if they differ."""
        modes: set[Accumulation] = {
            "layer_major" if rank.activations in LAYER_MAJOR else "micro_batch_major"
            for rank in self.ranks
            if rank.batch_size
        }
        return modes.pop() if len(modes) == 1 else None

    @property
    def predicted_seconds(self) -> float:
        """The mean simulated step at the share of clipped steps planned for."""
        share = self.clipped_share
        return (1.0 - share) * self.unclipped_seconds + share * self.clipped_seconds

    @property
    def gap(self) -> float:
        """The share by which the predicted step may be longer than that of the best plan.

        A simulated step is never shorter than its roofline bounds, nor those than ``lower_bound``.
        """
        return self.predicted_seconds / self.lower_bound - 1.0 if self.lower_bound else math.inf


@dataclass(frozen=True, slots=True)
class Found:
    """Workloads and shares of all ranks, with even or unequal shards."""

    workloads: tuple[Workload, ...]
    shares: tuple[Share, ...]
    step: float
    even: bool


def settle(
    problem: PlanProblem, workloads: Sequence[Workload], step: float, *, even: bool
) -> Found | None:
    """Returns shares for decided workloads with the shortest step of at least ``step`` seconds.

    None if no step is long enough.
    """
    rows = zip(problem.cluster.ranks, workloads, strict=True)
    longest = max(longest_step(problem, host, gpu, [work]) for (host, gpu), work in rows)
    low, high, growth = step, step, TOLERANCE
    while (shares := allocate(problem, workloads, high, even=even)) is None:
        if high >= longest:
            return None
        low, high = high, min(step * (1.0 + growth), longest)
        growth *= 2.0
    while high - low > TOLERANCE * high / 4.0:
        middle = (low + high) / 2.0
        found = allocate(problem, workloads, middle, even=even)
        if found is None:
            low = middle
        else:
            high, shares = middle, found
    return Found(tuple(workloads), tuple(shares), roofline_step(problem, workloads, shares), even)


def parts(problem: PlanProblem, share: Share) -> tuple[float, float]:
    """Returns how many parameters have their state on the GPU, and how many on the host."""
    model = problem.model
    shard = share.fraction * model.parameters
    on_gpu = shard * model.gpu_part(share.gpu_layers)
    return on_gpu, shard - on_gpu


def _bounds(
    problem: PlanProblem, workloads: Sequence[Workload], shares: Sequence[Share]
) -> list[dict[str, float]]:
    """Returns each rank's seconds by roofline bound; "host" counts all ranks of its host."""
    both = [parts(problem, share) for share in shares]
    bounds: list[dict[str, float]] = []
    for host, ranks in problem.cluster.host_ranks:
        moved = sum(traffic(problem, *both[rank], workloads[rank].offloaded) for rank in ranks)
        for rank, gpu in zip(ranks, host.gpus, strict=True):
            own = roofline(problem, host, gpu, workloads[rank], *both[rank])
            bounds.append(own | {"host": moved / host.bandwidth})
    return bounds


def roofline_step(
    problem: PlanProblem, workloads: Sequence[Workload], shares: Sequence[Share]
) -> float:
    """Seconds of a step by the roofline bounds of cost_model.py."""
    return max(max(one.values()) for one in _bounds(problem, workloads, shares))


def _more_gpu_layers(problem: PlanProblem, found: Found, steps: PlannedStep) -> tuple[Share, ...]:
    """Returns the shares, with more GPU layers if they fit and shorten the simulated step."""
    most: list[int] = []
    for work, share in zip(found.workloads, found.shares, strict=True):
        shard = share.fraction * problem.model.parameters
        most.append(max(share.gpu_layers, gpu_layers_that_fit(problem, work, shard)))
    numbers = steps.worthwhile_layers(most)
    if steps.seconds(numbers) >= steps.seconds():
        return found.shares
    return tuple(
        replace(share, gpu_layers=number)
        for share, number in zip(found.shares, numbers, strict=True)
    )


def _limit(seconds: dict[str, float], fetching: float) -> str:
    """Returns the name of the longest bound; "weights" for a GPU that waits for fetches."""
    longest = max(seconds, key=seconds.__getitem__)
    waits = longest == "gpu" and fetching > _NOTABLE * seconds[longest]
    return "weights" if waits else longest


def to_plan(problem: PlanProblem, found: Found, bound: float) -> Plan:
    """Returns what was found as a simulated plan, with the GPU layers that make it shortest."""
    steps = PlannedStep(problem, found.workloads, found.shares, even=found.even)
    shares = _more_gpu_layers(problem, found, steps)
    steps = PlannedStep(problem, found.workloads, shares, even=found.even)
    ranks: list[PlannedRank] = []
    bounds, late = _bounds(problem, found.workloads, shares), steps.late_layers
    rows = zip(problem.cluster.ranks, found.workloads, shares, late, bounds, strict=True)
    for (host, gpu), work, share, split, by_limit in rows:
        on_gpu, on_cpu = parts(problem, share)
        held = host_bytes(problem, on_gpu, on_cpu, work.offloaded)
        if problem.splits_master:
            last = sum(problem.model.update_sizes[problem.model.num_updates - split :])
            held += (MASTER_BYTES - SPLIT_BYTES) * (on_cpu - share.fraction * last)
        ranks.append(
            PlannedRank(
                host=host.name,
                device=gpu.name,
                multiprocessors=gpu.multiprocessors,
                memory_bytes=gpu.memory_bytes if gpu.limit_bytes is None else gpu.limit_bytes,
                batch_size=work.batch,
                microbatch_size=work.microbatch,
                activations=work.activations,
                shard_fraction=share.fraction,
                gpu_layers=share.gpu_layers,
                step_seconds=max(by_limit.values()),
                gpu_bytes=_whole(gpu_bytes(problem, gpu, work, on_gpu, on_cpu)),
                host_bytes=_whole(held),
                limit=_limit(by_limit, work.fetching(on_gpu + on_cpu)),
            )
        )
    least = max(rank.step_seconds for rank in ranks)
    return Plan(
        ranks=tuple(ranks),
        step_seconds=found.step,
        lower_bound=bound,
        shortest_step=found.step,
        even=found.even,
        unclipped_seconds=max(least, steps.seconds(clipped_share=0.0)),
        clipped_seconds=max(least, steps.seconds(clipped_share=1.0)),
        clipped_share=problem.clipped_share,
        late_layers=late,
    )


def _whole(num_bytes: float) -> int:
    """Rounds bytes up, ignoring the rounding errors of float sums."""
    return math.ceil(num_bytes * (1.0 - 1e-12))


def plan_file(problem: PlanProblem, plan: Plan) -> PlanFile:
    """Returns a plan as the record of plan.json."""
    model = {name: getattr(problem.model, name) for name in PlannedModel.model_fields}
    return PlanFile(
        version=VERSION,
        model=PlannedModel(**model),
        global_batch=problem.batch,
        stage=problem.stage,
        offload_param="cpu" if problem.offload_param else None,
        predicted=Predicted(
            step_seconds=plan.predicted_seconds,
            unclipped_seconds=plan.unclipped_seconds,
            clipped_seconds=plan.clipped_seconds,
            lower_bound=plan.lower_bound,
            gap=plan.gap if math.isfinite(plan.gap) else None,
        ),
        ranks=plan.ranks,
    )


def even_split(problem: PlanProblem) -> Plan | None:
    """Returns the best plan in which all ranks have equal batches, micro-batches and shards.

    It is the best of all micro-batches, policies and numbers of GPU layers; None if none fits. The
    remainder of the batch is left out.
    """
    number = problem.cluster.num_ranks
    best: tuple[PlanProblem, Found] | None = None
    batch = problem.batch // number
    problem = replace(problem, batch=number * batch)
    collectives = Collectives.of(problem, even=True)
    gpus = [gpu for _, gpu in problem.cluster.ranks]
    common = set.intersection(*(set(gpu.micro_batches(batch)) for gpu in gpus))
    if problem.sequence_ranks > 1:  # trained without a plan: all micro-batches are equal
        common = {size for size in common if batch % size == 0}
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
