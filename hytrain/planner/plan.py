"""The plan for unequal GPUs with offloaded state: found by bisection, with a bound on the best.

The step's length T is bisected. Whether a T is possible is asked of frontier.py in two readings:
the outer one proves that no plan is faster than ``lower_bound``, the inner one finds loads, for
which allocation.py then finds the shards and whole layers, exactly. So a plan comes with a gap:
it is at most that share longer than the best. Both are worked out for even shards, whose
collectives are faster, and for unequal ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hytrain.planner.allocation import Share, allocate
from hytrain.planner.frontier import Frontier
from hytrain.planner.loads import (
    Collectives,
    Lines,
    Load,
    gpu_bytes,
    host_bytes,
    lines,
    load,
    traffic,
)
from hytrain.planner.problem import Activations, GpuProfile, Host, PlanProblem
from hytrain.planner.uneven import Infeasible

# Bisection ends where the step is known to this share.
_TOLERANCE = 1e-4
# Steps between the bound and the plan that are tried for loads that suit whole layers better.
_RETRIES = 16
_GIB = 1024**3

Predictor = Callable[[Host, GpuProfile, Load, Share], float]
"""Seconds of a rank's step, by a finer model than the lines of loads.py."""


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
        limit: what its step is as long as: "gpu", "cpu", "copies" or "host".
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
class Plan:
    """A plan and how good it is.

    Attributes:
        ranks: in rank order.
        step_seconds: by the lines of loads.py.
        lower_bound: no plan of this cost model has a shorter step.
        even: whether all shards are equal.
    """

    ranks: tuple[RankPlan, ...]
    step_seconds: float
    lower_bound: float
    even: bool

    @property
    def predicted_seconds(self) -> float:
        """The slowest rank's step, by the finer model where one was given."""
        return max(rank.step_seconds for rank in self.ranks)

    @property
    def gap(self) -> float:
        """By what share the step may be longer than the best."""
        return self.step_seconds / self.lower_bound - 1.0 if self.lower_bound > 0.0 else math.inf


@dataclass(frozen=True, slots=True)
class _Found:
    """Loads with their shares, of even or of unequal shards."""

    loads: tuple[Load, ...]
    shares: tuple[Share, ...]
    step: float
    even: bool


def make_plan(problem: PlanProblem, *, predict: Predictor | None = None) -> Plan | Infeasible:
    """The fastest plan found, and a bound on the fastest that there is.

    Args:
        problem: what is to be dealt to whom.
        predict: a finer model, asked for the predicted step of the plan that was found; the bound
            and the choice are by the lines of loads.py.
    """
    cluster = problem.cluster
    if not problem.allow_idle and problem.batch < cluster.num_ranks:
        return Infeasible(
            f"a batch of {problem.batch} is less than {cluster.num_ranks} ranks, each of which "
            "must compute a sample: raise the batch, or let ranks be idle"
        )
    bound = math.inf
    found: _Found | None = None
    frontiers = [Frontier(problem, even=True)]
    if cluster.num_ranks > 1:
        frontiers.append(Frontier(problem, even=False))
    for frontier in frontiers:
        possible = _lower_bound(frontier)
        if possible is None:
            continue
        bound = min(bound, possible)
        best = _search(frontier, possible, math.inf if found is None else found.step)
        if best is not None and (found is None or best.step < found.step * (1.0 - _TOLERANCE)):
            found = best
    if found is None:
        return _missing(problem, frontiers[-1], is_bounded=math.isfinite(bound))
    return _plan(problem, found, min(bound, found.step), predict)


def _lower_bound(frontier: Frontier) -> float | None:
    """The longest step that is proven impossible; None where every step is."""
    longest = frontier.longest()
    if not frontier.covers(longest):
        return None
    low, high = _bisect(frontier.covers, 0.0, longest)
    growth = _TOLERANCE
    while frontier.choose(high, outer=True) is None:
        if high >= longest:
            return None
        low, high = high, min(high * (1.0 + growth), longest)
        growth *= 2.0
    return _bisect(lambda step: frontier.choose(step, outer=True) is not None, low, high)[0]


def _bisect(able: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Where it becomes able, to the tolerance; it is at ``high``."""
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if able(middle) else (middle, high)
    return low, high


def _search(frontier: Frontier, low: float, worst: float) -> _Found | None:
    """The fastest plan by the inner reading; None where none is faster than ``worst``."""
    longest = min(frontier.longest(), worst)
    best: _Found | None = None
    high, growth = low, _TOLERANCE
    while True:  # gallop up from the bound: the best is close to it
        high = min(low * (1.0 + growth), longest)
        best = _finish(frontier, high)
        if best is not None or high >= longest:
            break
        growth *= 2.0
    if best is None:
        return None
    low = max(low, low * (1.0 + growth / 2.0)) if growth > _TOLERANCE else low
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2.0
        better = _finish(frontier, middle)
        if better is None:
            low = middle
        else:
            high = middle
            best = better if better.step < best.step else best
    # Loads chosen for a longer step may take whole layers better.
    for number in range(1, _RETRIES):
        longer = low * (best.step / low) ** (number / _RETRIES)
        better = _finish(frontier, longer) if longer > high else None
        best = better if better is not None and better.step < best.step else best
    return best


def _finish(frontier: Frontier, step: float) -> _Found | None:
    """Loads that fit a step by the inner reading, with shares; the step may come out longer.

    Whole layers may not fit where parts of layers do: then the step grows until they do.
    """
    problem = frontier.problem
    chosen = frontier.choose(step, outer=False)
    if chosen is None:
        return None
    loads = _deal(frontier, chosen)
    low, high = step, step
    shares = allocate(problem, loads, high, even=frontier.even)
    growth = _TOLERANCE
    while shares is None:
        low, high = high, step * (1.0 + growth)
        if growth > 1.0:
            return None
        growth *= 2.0
        shares = allocate(problem, loads, high, even=frontier.even)
    while high - low > _TOLERANCE * high / 4.0:
        middle = (low + high) / 2.0
        found = allocate(problem, loads, middle, even=frontier.even)
        if found is None:
            low = middle
        else:
            high, shares = middle, found
    return _Found(tuple(loads), tuple(shares), _step(problem, loads, shares), frontier.even)


def _deal(frontier: Frontier, chosen: Sequence[Load]) -> list[Load]:
    """The loads with samples taken from the slowest until they are the batch."""
    problem = frontier.problem
    collectives = Collectives.of(problem, even=frontier.even)
    batches = [work.batch for work in chosen]
    least = 0 if problem.allow_idle else 1
    for _ in range(sum(batches) - problem.batch):
        able = [rank for rank, batch in enumerate(batches) if batch > least]
        slowest = max(
            able, key=lambda rank: chosen[rank].compute * batches[rank] / chosen[rank].batch
        )
        batches[slowest] -= 1
    dealt: list[Load] = []
    for (_, gpu), work, batch in zip(problem.cluster.ranks, chosen, batches, strict=True):
        if batch == work.batch:
            dealt.append(work)
            continue
        size = min(work.microbatch, batch)
        dealt.append(load(problem, gpu, collectives, batch, size, work.activations))
    return dealt


def _parts(problem: PlanProblem, share: Share) -> tuple[float, float]:
    """Parameters of state on the GPU and on the host."""
    model = problem.model
    shard = share.fraction * model.parameters
    on_gpu = shard * share.gpu_layers / model.num_layers
    return on_gpu, shard - on_gpu


def _lines(problem: PlanProblem, loads: Sequence[Load], shares: Sequence[Share]) -> list[Lines]:
    rows = zip(problem.cluster.ranks, loads, shares, strict=True)
    return [lines(host, gpu, work, *_parts(problem, share)) for (host, gpu), work, share in rows]


def _host_seconds(
    problem: PlanProblem, loads: Sequence[Load], shares: Sequence[Share]
) -> list[float]:
    """For each rank, what its host's memory needs for the step of all its ranks."""
    seconds: list[float] = []
    first = 0
    for host in problem.cluster.hosts:
        ranks = range(first, first + len(host.gpus))
        first += len(host.gpus)
        moved = sum(
            traffic(problem, loads[rank], _parts(problem, shares[rank])[1]) for rank in ranks
        )
        seconds += [moved / host.bandwidth] * len(host.gpus)
    return seconds


def _step(problem: PlanProblem, loads: Sequence[Load], shares: Sequence[Share]) -> float:
    own = max(line.longest for line in _lines(problem, loads, shares))
    return max(own, *_host_seconds(problem, loads, shares))


def _plan(problem: PlanProblem, found: _Found, bound: float, predict: Predictor | None) -> Plan:
    ranks: list[RankPlan] = []
    rows = zip(
        problem.cluster.ranks,
        found.loads,
        found.shares,
        _lines(problem, found.loads, found.shares),
        _host_seconds(problem, found.loads, found.shares),
        strict=True,
    )
    for (host, gpu), work, share, line, shared in rows:
        on_gpu, on_cpu = _parts(problem, share)
        by_limit = {"gpu": line.gpu, "cpu": line.cpu, "copies": line.copies, "host": shared}
        seconds = max(by_limit.values())
        ranks.append(
            RankPlan(
                host=host.name,
                device=gpu.name,
                batch_size=work.batch,
                microbatch_size=work.microbatch,
                activations=work.activations,
                shard_fraction=share.fraction,
                gpu_layers=share.gpu_layers,
                step_seconds=predict(host, gpu, work, share) if predict else seconds,
                gpu_bytes=gpu_bytes(problem, gpu, work, on_gpu, on_cpu),
                host_bytes=host_bytes(problem, work, on_cpu),
                limit=max(by_limit, key=by_limit.__getitem__),
            )
        )
    return Plan(tuple(ranks), found.step, bound, found.even)


def _missing(problem: PlanProblem, frontier: Frontier, *, is_bounded: bool) -> Infeasible:
    """What no step, however long, would mend."""
    cluster = problem.cluster
    for rank, (host, gpu) in enumerate(cluster.ranks):
        if not frontier.menu(host, gpu).loads:
            return _rank_is_missing(problem, rank, gpu)
    longest = frontier.longest()
    held = frontier.held(longest)
    total = problem.model.parameters * problem.host_state_bytes
    if is_bounded:
        return Infeasible(
            "the state fits only if layers are split between GPU and host, or by less than a "
            "thousandth of it: no plan was found; a little more memory would help"
        )
    return Infeasible(
        f"the GPUs and hosts can hold {held:.1%} of the model's optimizer state together: memory "
        f"for {(1.0 - held) * total / _GIB:.2f} GiB is missing, on any host or GPU",
        (1.0 - held) * total / _GIB,
    )


def _rank_is_missing(problem: PlanProblem, rank: int, gpu: GpuProfile) -> Infeasible:
    """A rank whose GPU holds not even the training copy with the smallest micro-batch."""
    collectives = Collectives.of(problem, even=True)
    batch = 0 if problem.allow_idle else 1
    roomy = replace(gpu, memory_bytes=2**62)
    works = [
        load(problem, roomy, collectives, batch, batch, policy) for policy in problem.activations
    ]
    missing = (2**62 - max(work.room for work in works) - gpu.memory_bytes) / _GIB
    what = "nothing but the training copy" if batch == 0 else "a single sample"
    return Infeasible(
        f"rank {rank} ({gpu.name}) has {gpu.memory_bytes / _GIB:.2f} GiB, {missing:.2f} too little "
        f"for {what} (stage 3 would shard that)"
        if problem.stage != 3
        else f"rank {rank} ({gpu.name}) has {missing:.2f} GiB too little for {what}",
        missing,
        rank,
    )
