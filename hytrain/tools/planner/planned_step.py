"""The step of a plan's ranks as :mod:`hytrain.cost` simulates it, and GPU layers that shorten it.

It is finer than the roofline bounds of cost_model.py. In stage 3 the ranks gather each layer
together. If micro-batches pass through the model one by one, they do so in every one of them: all
take as long as the slowest one, and a rank with fewer micro-batches waits before its first. Layer
by layer they meet once per layer and pass, however many micro-batches each has. With weights in
host memory every gather begins with a copy of each rank's part from there: all wait for the
longest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hytrain.cost.simulate import Collectives as LayerCollectives
from hytrain.cost.simulate import Rank, first_on_gpu, simulate
from hytrain.cost.step import Launches, LayerCosts, StepCosts, clipped_passes
from hytrain.formats.moment_kinds import MASTER_BYTES, SPLIT_BYTES
from hytrain.formats.policies import LAYER_MAJOR
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import Workload
from hytrain.tools.planner.layer_seconds import (
    Collectives,
    fetch_seconds,
    layer_passes,
    micro_seconds,
    outside_seconds,
    split_batch,
)
from hytrain.tools.planner.problem import PlanProblem

# Share of the step that more GPU layers must gain.
_WORTHWHILE = 0.003
_MOST_CANDIDATES = 24


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of a layer's first forward, of all that is between (all layers together, and outside
    of them), of a layer's last backward."""

    first: float = 0.0
    middle: float = 0.0
    last: float = 0.0

    def total(self, layers: int) -> float:
        return layers * (self.first + self.last) + self.middle


class PlannedStep:
    """The simulated steps of a plan's ranks."""

    def __init__(
        self,
        problem: PlanProblem,
        workloads: Sequence[Workload],
        shares: Sequence[Share],
        *,
        even: bool,
    ) -> None:
        """Takes each rank's work and state; ``even``: whether all shards are equal."""
        self._problem = problem
        self._collectives = _layer_collectives(problem, even=even)
        whole = problem.model.parameters
        fetches = [
            fetch_seconds(problem, gpu, work.activations, share.fraction * whole)
            for (_, gpu), work, share in zip(problem.cluster.ranks, workloads, shares, strict=True)
        ]
        # A layer has come when the last rank's part has.
        fetch = max(once for once, _ in fetches), max(back for _, back in fetches)
        collectives = Collectives.of(problem, even=even)
        passes = [
            _own_passes(problem, gpu, collectives, work, fetch)
            for (_, gpu), work in zip(problem.cluster.ranks, workloads, strict=True)
        ]
        if problem.stage == 3:
            passes = _together(problem, passes, workloads, fetch)
        # Equal ranks are simulated once.
        kinds: dict[tuple[object, ...], Rank] = {}
        self._ranks: list[Rank] = []
        rates = _worker_rates(problem, shares)
        rows = zip(problem.cluster.ranks, workloads, shares, passes, rates, strict=True)
        for (host, gpu), work, share, own, rate in rows:
            late_from = _first_late_layers(problem, host, work, share.fraction)
            key = (id(gpu), work, share, own, rate, late_from)
            if key not in kinds:
                kinds[key] = _rank(problem, gpu, work, share, own, rate, late_from)
            self._ranks.append(kinds[key])
        self._shares = shares

    def seconds(
        self, gpu_layers: Sequence[int] | None = None, *, clipped_share: float | None = None
    ) -> float:
        """Returns the seconds of a step in the steady state.

        Args:
            gpu_layers: a number for each rank; None for the shares' own.
            clipped_share: share of clipped steps, in [0, 1]; None for the problem's.
        """
        share = self._problem.clipped_share if clipped_share is None else clipped_share
        ranks = self._ranks
        if gpu_layers is not None:
            pairs = zip(self._ranks, gpu_layers, strict=True)
            kinds = {pair: _placed(*pair) for pair in dict.fromkeys(pairs)}
            ranks = list(kinds.values())
        return simulate(list(dict.fromkeys(ranks)), self._collectives, share)

    @property
    def late_layers(self) -> tuple[int, ...]:
        """For each rank, how many layers the CPU updates only when the step's outcome is known."""
        return tuple(rank.late_layers for rank in self._ranks)

    def worthwhile_layers(self, most: Sequence[int]) -> list[int]:
        """Returns the GPU layers with which each rank's updates delay the step least.

        For each rank this is its own number, or a larger one that shortens the step, up to
        ``most``, which has room.
        """
        found: dict[tuple[Rank, int], int] = {}
        for pair in zip(self._ranks, most, strict=True):
            if pair not in found:
                found[pair] = self._worthwhile(*pair)
        return [found[pair] for pair in zip(self._ranks, most, strict=True)]

    def _worthwhile(self, rank: Rank, most: int) -> int:
        own = rank.num_gpu_layers
        if most <= own or own == len(rank.costs.layers):
            return own
        kinds = list(dict.fromkeys(self._ranks))
        numbers = [*range(own, most, -(-(most - own) // _MOST_CANDIDATES)), most]
        steps: list[float] = []
        for number in numbers:
            other = _placed(rank, number)
            others = [other if one is rank else one for one in kinds]
            share = self._problem.clipped_share
            steps.append(simulate(others, self._collectives, share, updating=[other]))
        allowed = min(steps) * (1.0 + _WORTHWHILE)
        return next(number for number, step in zip(numbers, steps, strict=True) if step <= allowed)


def _placed(rank: Rank, gpu_layers: int) -> Rank:
    """Returns the same rank with another number of layers on its GPU."""
    places = first_on_gpu(gpu_layers, len(rank.costs.layers))
    return Rank(rank.costs, places, rank.launches, has_samples=rank.has_samples)


def _layer_collectives(problem: PlanProblem, *, even: bool) -> LayerCollectives:
    """Returns the collectives of each layer that training updates."""
    sizes = [problem.model.itemsize * size for size in problem.model.update_sizes]
    pairs = [problem.cluster.collective_seconds(size, size, even=even) for size in sizes]
    gather, scatter = zip(*pairs, strict=True)
    # In stage 3 layers are gathered when they are used: the passes include that.
    return LayerCollectives((0.0,) * len(sizes) if problem.stage == 3 else gather, scatter)


def _own_passes(
    problem: PlanProblem,
    gpu: GpuProfile,
    collectives: Collectives,
    work: Workload,
    fetch: tuple[float, float],
) -> _Passes:
    """Returns the passes of one rank; each forward waits for the first layer's fetch.

    ``fetch``: seconds to fetch a layer's weights, in forward and in backward.
    """
    layers = problem.model.num_layers
    sizes = split_batch(work.batch, work.microbatch)
    if not sizes:
        return _Passes()
    # In stages 1 and 2 the simulation has the layers' waits for collectives.
    here = {} if problem.stage == 3 else {"gather": 0.0, "scatter": 0.0}
    copy = work.offloaded / layers / gpu.copy_rate
    own = replace(collectives, **here)
    passes = layer_passes(problem, gpu, own, sizes, copy, work.activations, fetch)
    forwards = 1 if work.activations in LAYER_MAJOR else sum(count for count, _ in sizes)
    waited = forwards * fetch[0]
    middle = layers * passes.further + outside_seconds(gpu, sizes) + waited
    return _Passes(passes.first, middle, passes.last)


def _together(
    problem: PlanProblem,
    passes: Sequence[_Passes],
    workloads: Sequence[Workload],
    fetch: tuple[float, float],
) -> list[_Passes]:
    """Returns the passes in stage 3, where all wait for the slowest rank in each layer or round."""
    layers = problem.model.num_layers
    first, last = max(own.first for own in passes), max(own.last for own in passes)
    if all(work.activations in LAYER_MAJOR for work in workloads if work.batch):
        middle = max(own.middle for own in passes)
    else:
        rounds = _round_seconds(problem, workloads, fetch)
        longest = max(own.total(layers) for own in passes)
        middle = max(0.0, max(longest, sum(rounds)) - layers * (first + last))
    slowest = _Passes(first, middle, last)
    return [slowest if own.last > 0.0 else own for own in passes]


def _round_seconds(
    problem: PlanProblem, workloads: Sequence[Workload], fetch: tuple[float, float]
) -> list[float]:
    """Returns the slowest rank's seconds of each round, last round first: those coincide."""
    layers = problem.model.num_layers
    rounds: list[float] = []
    for (_, gpu), work in zip(problem.cluster.ranks, workloads, strict=True):
        sizes = split_batch(work.batch, work.microbatch)
        each = [size for count, size in sizes for _ in range(count)]
        rounds += [0.0] * (len(each) - len(rounds))
        for number, size in enumerate(reversed(each)):
            once, back = micro_seconds(gpu, size, work.activations)
            once, back = max(once, fetch[0]), max(back, fetch[1])
            seconds = layers * (once + back) + outside_seconds(gpu, [(1, size)])
            rounds[number] = max(rounds[number], seconds)
    return rounds


def _worker_rates(problem: PlanProblem, shares: Sequence[Share]) -> list[float]:
    """Returns the parameters/s of each rank's worker, with all workers of its host busy."""
    layers = len(problem.model.update_sizes)
    rates: list[float] = []
    for host in problem.cluster.hosts:
        own = shares[len(rates) : len(rates) + len(host.gpus)]
        busy = sum(share.fraction > 0.0 and share.gpu_layers < layers for share in own)
        together = host.bandwidth / problem.update_bytes
        rates += [min(host.rank_update_rate, together / max(1, busy))] * len(own)
    return rates


def _first_late_layers(
    problem: PlanProblem, host: Host, work: Workload, fraction: float
) -> tuple[int, ...]:
    """Returns for 0..L GPU layers the first CPU layer with split master weights; () if none may be.

    The rule is that of training, with equal parts of a host for its ranks.
    """
    if not problem.splits_master:
        return ()
    sizes = [fraction * size for size in problem.model.update_sizes]
    before = list(accumulate(sizes, initial=0.0))
    part = host.memory_bytes / len(host.gpus)
    taken = work.offloaded + problem.host_weight_bytes * before[-1]
    if_whole = [(MASTER_BYTES - SPLIT_BYTES) * size for size in before]
    rooms = [part - taken - problem.host_state_bytes * (before[-1] - gone) for gone in before]
    return tuple(
        max(k, bisect_right(if_whole, if_whole[k] + room) - 1) for k, room in enumerate(rooms)
    )


def _rank(
    problem: PlanProblem,
    gpu: GpuProfile,
    work: Workload,
    share: Share,
    passes: _Passes,
    rate: float,
    late_from: tuple[int, ...],
) -> Rank:
    model = problem.model

    def layer(size: float, *, is_block: bool) -> LayerCosts:
        shard = share.fraction * size
        update, copied = shard / rate, model.itemsize * shard / gpu.copy_rate
        commit, preview = clipped_passes(update)
        # Weights in host memory are fetched when they are gathered.
        to_device, write_back = (0.0, copied) if problem.offload_param else (copied, 0.0)
        return LayerCosts(
            name="",
            parameters=round(shard),
            forward=passes.first if is_block else 0.0,
            backward=passes.last if is_block else 0.0,
            to_host=copied,
            cpu_update=update,
            cpu_commit=commit,
            cpu_preview=preview,
            to_device=to_device,
            gpu_update=shard / gpu.update_rate,
            write_back=write_back,
            cpu_late=update,
        )

    before, after = model.outside
    layers = (layer(model.block_size, is_block=True),) * model.num_layers
    layers = (layer(before, is_block=False),) * (before > 0) + layers
    layers += (layer(after, is_block=False),) * (after > 0)
    costs = StepCosts(layers, between=passes.middle, late_from=late_from)
    places = first_on_gpu(share.gpu_layers, len(layers))
    launches = step_launches(problem, gpu, work, share.fraction)
    return Rank(costs, places, launches, has_samples=passes.first > 0.0)


def step_launches(
    problem: PlanProblem, gpu: GpuProfile, work: Workload, fraction: float
) -> Launches:
    """Returns what the host takes to launch a rank's step with ``fraction`` of the state."""
    times, sizes = gpu.launches, split_batch(work.batch, work.microbatch)
    if times is None or not sizes:
        return Launches()
    passes = taken = needed = 0.0
    for count, size in sizes:
        # A recomputed forward is launched again.
        kept = gpu.forward_ms.at(size) + gpu.backward_ms.at(size)
        again = 1e3 * sum(micro_seconds(gpu, size, work.activations)) / kept if kept > 0.0 else 1.0
        layers = count * problem.model.num_layers * again
        outside = 1e3 * outside_seconds(gpu, [(count, size)])
        passes += layers * times.layer_ms.at(size) + count * times.outside_ms.at(size)
        taken += layers * kept + outside
        needed += layers * min(kept, times.device(size, kept))
        needed += min(outside, count * times.outside_device(size, outside / count))
    updated = [round(fraction * size) for size in problem.model.update_sizes]
    numbers = range(len(updated) + 1)
    return Launches(
        passes=passes / 1e3,
        slowdown=times.slowdown,
        on_gpu=tuple(ms / 1e3 for ms in times.updates.on_gpu(updated)),
        in_passes=tuple(times.updates.in_passes(k, len(updated) - k) / 1e3 for k in numbers),
        device_share=needed / taken if taken > 0.0 else 1.0,
        # About as long as launching a block: 0.7, 1.0 and 1.2 times that on three hosts
        # (experiments/solve_k/regimes.json, the tail of steps without updates on the GPU).
        after_decision=times.layer_ms.at(sizes[0][1]) / 1e3,
    )
