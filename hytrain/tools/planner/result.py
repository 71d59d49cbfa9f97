"""A plan: what each rank does, what it shall take, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hytrain.formats.policies import LAYER_MAJOR, Accumulation, Activations
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.allocation import Share, allocate
from hytrain.tools.planner.cost_model import (
    Lines,
    Load,
    gpu_bytes,
    gpu_layers_that_fit,
    host_bytes,
    lines,
    longest_step,
    traffic,
)
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import PlanProblem

TOLERANCE = 1e-4
"""Bisection ends where the step is known to this share."""
# A step of which weights from the host are this share is limited by them.
_NOTABLE = 0.05


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank does, and what that is predicted to take.

    Attributes:
        host: its host's name.
        device: its GPU's name.
        batch_size: its samples of the global batch; may be 0.
        microbatch_size: of them at once; 0 where there are none.
        activations: policy between layers.
        shard_fraction: of the state, and in stage 3 of the training copy.
        gpu_layers: layers of its shard that the GPU updates, counted from the first.
        step_seconds: its own, without waiting for others.
        gpu_bytes: peak.
        host_bytes: that it keeps on its host.
        limit: what its step is as long as: "gpu", "cpu", "copies" or "host", or "weights" where the
            GPU waits for its weights to come from the host.
    """

    host: str
    device: str
    batch_size: int
    microbatch_size: int
    activations: Activations
    shard_fraction: float
    gpu_layers: int
    step_seconds: float
    gpu_bytes: float
    host_bytes: float
    limit: str


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
        step_seconds: by the lines of cost_model.py, by which it was chosen.
        lower_bound: no plan has a shorter step by these lines, which are of unclipped steps.
        shortest_step: by these lines, of all plans that were compared. Less than ``step_seconds``
            where the finer model finds this plan faster.
        even: whether all shards are equal.
        unclipped_seconds: a step that is not clipped, by the finer model of planned_step.py.
        clipped_seconds: one that is.
        clipped_share: that was planned for.
        other_mode: what it was chosen over; None where there was no choice, or each rank has its
            own.
    """

    ranks: tuple[RankPlan, ...]
    step_seconds: float
    lower_bound: float
    shortest_step: float
    even: bool
    unclipped_seconds: float
    clipped_seconds: float
    clipped_share: float
    other_mode: OtherMode | None = None

    @property
    def accumulation(self) -> Accumulation | None:
        """The mode of all ranks with samples; None where they differ."""
        modes: set[Accumulation] = {
            "layer_major" if rank.activations in LAYER_MAJOR else "micro_batch_major"
            for rank in self.ranks
            if rank.batch_size
        }
        return modes.pop() if len(modes) == 1 else None

    @property
    def predicted_seconds(self) -> float:
        """The mean step, by the finer model, with the share of clipped steps planned for."""
        share = self.clipped_share
        return (1.0 - share) * self.unclipped_seconds + share * self.clipped_seconds

    @property
    def gap(self) -> float:
        """By what share the predicted step may be longer than that of any other plan.

        A plan's prediction is never shorter than its step by the lines, nor that than the bound.
        """
        return self._above_bound(self.predicted_seconds)

    @property
    def limits_gap(self) -> float:
        """Likewise by the lines alone."""
        return self._above_bound(self.step_seconds)

    def _above_bound(self, seconds: float) -> float:
        return seconds / self.lower_bound - 1.0 if self.lower_bound > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class Found:
    """Loads with their shares, of even or of unequal shards."""

    loads: tuple[Load, ...]
    shares: tuple[Share, ...]
    step: float
    even: bool


def settle(problem: PlanProblem, loads: Sequence[Load], step: float, *, even: bool) -> Found | None:
    """Shares for loads that are decided, with the shortest step from ``step`` on.

    None where no step is long enough.
    """
    rows = zip(problem.cluster.ranks, loads, strict=True)
    longest = max(longest_step(problem, host, gpu, [work]) for (host, gpu), work in rows)
    low, high, growth = step, step, TOLERANCE
    while (shares := allocate(problem, loads, high, even=even)) is None:
        if high >= longest:
            return None
        low, high = high, min(step * (1.0 + growth), longest)
        growth *= 2.0
    while high - low > TOLERANCE * high / 4.0:
        middle = (low + high) / 2.0
        found = allocate(problem, loads, middle, even=even)
        if found is None:
            low = middle
        else:
            high, shares = middle, found
    return Found(tuple(loads), tuple(shares), line_step(problem, loads, shares), even)


def parts(problem: PlanProblem, share: Share) -> tuple[float, float]:
    """Parameters of state on the GPU and on the host."""
    model = problem.model
    shard = share.fraction * model.parameters
    on_gpu = shard * model.gpu_part(share.gpu_layers)
    return on_gpu, shard - on_gpu


def _lines(problem: PlanProblem, loads: Sequence[Load], shares: Sequence[Share]) -> list[Lines]:
    rows = zip(problem.cluster.ranks, loads, shares, strict=True)
    return [
        lines(problem, host, gpu, work, *parts(problem, share)) for (host, gpu), work, share in rows
    ]


def _host_seconds(
    problem: PlanProblem, loads: Sequence[Load], shares: Sequence[Share]
) -> list[float]:
    """For each rank, what its host's memory needs for the step of all its ranks."""
    seconds: list[float] = []
    first = 0
    for host in problem.cluster.hosts:
        ranks = range(first, first + len(host.gpus))
        first += len(host.gpus)
        moved = sum(traffic(problem, loads[rank], *parts(problem, shares[rank])) for rank in ranks)
        seconds += [moved / host.bandwidth] * len(host.gpus)
    return seconds


def line_step(problem: PlanProblem, loads: Sequence[Load], shares: Sequence[Share]) -> float:
    """Seconds of a step by the lines of cost_model.py."""
    own = max(line.longest for line in _lines(problem, loads, shares))
    return max(own, *_host_seconds(problem, loads, shares))


def _more_gpu_layers(problem: PlanProblem, found: Found, steps: PlannedStep) -> tuple[Share, ...]:
    """The shares with as many more GPU layers as gain by the finer model and have room."""
    most: list[int] = []
    for work, share in zip(found.loads, found.shares, strict=True):
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
    """The longest line; of the GPU's, what it does or what it waits for."""
    longest = max(seconds, key=seconds.__getitem__)
    waits = longest == "gpu" and fetching > _NOTABLE * seconds[longest]
    return "weights" if waits else longest


def to_plan(problem: PlanProblem, found: Found, bound: float) -> Plan:
    """What was found, predicted by the finer model, and with the GPU layers that this asks for."""
    steps = PlannedStep(problem, found.loads, found.shares, even=found.even)
    shares = _more_gpu_layers(problem, found, steps)
    steps = PlannedStep(problem, found.loads, shares, even=found.even)
    own, shared = _lines(problem, found.loads, shares), _host_seconds(problem, found.loads, shares)
    ranks: list[RankPlan] = []
    rows = zip(problem.cluster.ranks, found.loads, shares, own, shared, strict=True)
    for (host, gpu), work, share, line, on_host in rows:
        on_gpu, on_cpu = parts(problem, share)
        by_limit = {"gpu": line.gpu, "cpu": line.cpu, "copies": line.copies, "host": on_host}
        ranks.append(
            RankPlan(
                host=host.name,
                device=gpu.name,
                batch_size=work.batch,
                microbatch_size=work.microbatch,
                activations=work.activations,
                shard_fraction=share.fraction,
                gpu_layers=share.gpu_layers,
                step_seconds=max(by_limit.values()),
                gpu_bytes=gpu_bytes(problem, gpu, work, on_gpu, on_cpu),
                host_bytes=host_bytes(problem, work, on_gpu, on_cpu),
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
    )
