"""The steps of all ranks together, walked through: finer than the lines of cost_model.py.

Ranks meet twice in a layer. Its gradient is final when the slowest rank's backward has passed it
and the reduce-scatters of the layers above are through; its new weights are there when the slowest
rank has updated its shard and all-gathers of the layers below are through. What is walked is the
time from one decision on clipping to the next:

- GPU of a rank: the update of its K layers, then forward, where each layer waits for its weights,
  further micro-batches, the last one's backward (layer-major: all micro-batches, layer by layer).
  No layer is through before its host has launched it (launching.py). Host and GPU meet at the
  decision; then the host goes on to forward, while the GPU still updates.
- Worker of a rank: among the layers whose gradient is final it takes the lowest; a layer takes the
  longer of its update and its copies, its first chunk must have come and its last one go back.
- Where the decision, at 0, is that the step is clipped: what a job that began before it previewed
  was in vain, and the layer is ready for a second job, another preview, from 0 on; its weights go
  back after that. A layer whose job begins later is done in one. Both kinds compete, lowest layer
  first. The first job takes a whole update: the worker leaves the preview out only once its own
  rank's norm exceeds the limit, which may be late.

In stage 3 the ranks gather each layer together. Where micro-batches pass through the model one by
one, they do so in every one of them: all take as long as the slowest one, and a rank with fewer
micro-batches waits for its first. Layer by layer they meet once a layer and pass, however many
micro-batches each has.

With weights in host memory every gather begins with a copy of each rank's part from there: all wait
for the longest. A layer that the GPU has updated is copied to the host before, beside the others'
updates; where the worker has, its weights are there.

Every layer's forward waits for that layer's weights, so the worker has nothing left when forward
has ended: one walk after another with the weights' times of the one before is the steady state.
Clipped steps and others are walked each for themselves, and steps of which a share is clipped take
the mean of both. For one rank that is exact (placement/prediction.py); several carry over who was
how late, which here is a step's of the same kind.

In thousands of random cases no clipped step came out shorter than an unclipped one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hytrain.config import CHUNK_ELEMENTS
from hytrain.formats.policies import LAYER_MAJOR
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import Load
from hytrain.tools.planner.launching import StepLaunches
from hytrain.tools.planner.passes import (
    Collectives,
    fetch_seconds,
    layer_passes,
    micro_seconds,
    micro_sizes,
    outside_seconds,
)
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.rank_walk import RankWalk

# A preview as a share of an update. By the bytes that they move it would be 0.53. On the host of an
# H200 it was 0.67 to 0.93 (experiments/solve_k: median 0.80 of 14 windows with every step clipped,
# 0.67 and 0.70 for two large models). Workers of two H200 were busy 1.7 times as long in clipped
# steps as in others (median of four, experiments/unequal_gpus, case half).
_PREVIEW = 0.8
_ROUNDS = 4
_SETTLED = 1e-6
# More GPU layers must gain so much of the step.
_WORTHWHILE = 0.003
_MOST_CANDIDATES = 24


@dataclass(frozen=True, slots=True)
class _Walked:
    """One walk.

    Attributes:
        seconds: its length.
        final: when each layer's gradient was, counted from its end.
        waited: for each kind of rank, how long its host waited for its worker.
    """

    seconds: float
    final: tuple[float, ...]
    waited: tuple[float, ...]


class StepSimulator:
    """The steps of a plan's ranks."""

    def __init__(
        self, problem: PlanProblem, loads: Sequence[Load], shares: Sequence[Share], *, even: bool
    ) -> None:
        """
        Args:
            problem: what was planned.
            loads: each rank's work.
            shares: each rank's state.
            even: whether all shards are equal.
        """
        self._collectives = Collectives.of(problem, even=even)
        # In stage 3 layers are gathered where they are used: the loads' seconds have that.
        self._gather = 0.0 if problem.stage == 3 else self._collectives.gather
        self._num_layers = problem.model.num_layers
        self._clipped_share = problem.clipped_share
        self._ranks: list[RankWalk] = []
        fetches = [
            fetch_seconds(problem, gpu, work.activations, share.fraction * problem.model.parameters)
            for (_, gpu), work, share in zip(problem.cluster.ranks, loads, shares, strict=True)
        ]
        # A layer is there when the part of the last rank is.
        fetch = max(once for once, _ in fetches), max(back for _, back in fetches)
        first = 0
        for host in problem.cluster.hosts:
            members = range(first, first + len(host.gpus))
            first += len(host.gpus)
            rate = _worker_rate(problem, host, [shares[rank] for rank in members])
            for rank, gpu in zip(members, host.gpus, strict=True):
                passes = _passes(problem, gpu, self._collectives, loads[rank], fetch)
                work = loads[rank]
                sizes = micro_sizes(work.batch, work.microbatch)
                share = shares[rank]
                launches = StepLaunches.of(
                    gpu, problem.model, sizes, work.activations, share.fraction
                )
                self._ranks.append(_rank(problem, gpu, passes, share, rate, launches))
        if problem.stage == 3:
            if all(work.activations in LAYER_MAJOR for work in loads if work.batch):
                self._ranks = _layer_by_layer(self._ranks)
            else:
                self._ranks = _in_rounds(problem, self._ranks, loads, fetch)

    def seconds(
        self, gpu_layers: Sequence[int] | None = None, *, clipped_share: float | None = None
    ) -> float:
        """The steady state's step.

        Args:
            gpu_layers: a number for each rank; None for the shares' own.
            clipped_share: of the steps, in [0, 1]; None for the problem's.
        """
        share = self._clipped_share if clipped_share is None else clipped_share
        ranks = self._ranks
        if gpu_layers is not None:
            ranks = [
                replace(rank, gpu_layers=number)
                for rank, number in zip(ranks, gpu_layers, strict=True)
            ]
        kinds = list(dict.fromkeys(ranks))
        return self._mean(kinds, kinds, share)

    def worthwhile_layers(self, most: Sequence[int]) -> list[int]:
        """GPU layers with which each rank's updates delay the step least.

        Args:
            most: for each rank, how many have room.

        Returns:
            For each rank its own number, or a larger one that gains.
        """
        kinds = list(dict.fromkeys(self._ranks))
        found: dict[tuple[RankWalk, int], int] = {}
        for rank, limit in zip(self._ranks, most, strict=True):
            if (rank, limit) not in found:
                found[rank, limit] = self._worthwhile(kinds, rank, limit)
        return [found[rank, limit] for rank, limit in zip(self._ranks, most, strict=True)]

    def _worthwhile(self, kinds: Sequence[RankWalk], rank: RankWalk, most: int) -> int:
        if most <= rank.gpu_layers or rank.gpu_layers == rank.layers:
            return rank.gpu_layers
        stride = -(-(most - rank.gpu_layers) // _MOST_CANDIDATES)
        numbers = [*range(rank.gpu_layers, most, stride), most]
        steps: list[float] = []
        for number in numbers:
            other = replace(rank, gpu_layers=number)
            others = [other if one == rank else one for one in kinds]
            steps.append(self._mean(others, [other], self._clipped_share))
        allowed = min(steps) * (1.0 + _WORTHWHILE)
        return next(number for number, step in zip(numbers, steps, strict=True) if step <= allowed)

    def _mean(self, kinds: Sequence[RankWalk], updating: Sequence[RankWalk], share: float) -> float:
        """The mean step where a share of them is clipped."""
        seconds = 0.0
        if share < 1.0:
            seconds += (1.0 - share) * self._settle(kinds, updating, clipped=False)
        if share > 0.0:
            seconds += share * self._settle(kinds, updating, clipped=True)
        return seconds

    def _settle(
        self, kinds: Sequence[RankWalk], updating: Sequence[RankWalk], *, clipped: bool
    ) -> float:
        """The step where only some kinds' updates are waited for.

        Several ranks may take turns: who waited long for weights begins backward late, and its
        gradients come when the worker has more time. Then it is the mean of two steps.
        """
        walked = self._walk(kinds, [0.0] * self._num_layers, [0.0] * len(kinds), clipped=clipped)
        seconds = walked.seconds
        for _ in range(_ROUNDS):
            weights = [rank.updated(walked.final, clipped=clipped) for rank in updating]
            updated = [max(times) for times in zip(*weights, strict=True)]
            again = self._walk(kinds, updated, walked.waited, clipped=clipped)
            is_settled = _is_same(walked, again)
            seconds = (walked.seconds + again.seconds) / 2.0
            walked = again
            if is_settled:
                break
        return seconds

    def _walk(
        self,
        kinds: Sequence[RankWalk],
        updated: Sequence[float],
        waited: Sequence[float],
        *,
        clipped: bool,
    ) -> _Walked:
        """From a decision, at 0, to the next.

        ``updated``: when each layer's shards are; ``waited``: what each kind's host waits for its
        worker.
        """
        gathered: list[float] = []
        now = 0.0
        for time in updated:
            now = max(now, time) + self._gather
            gathered.append(now)
        passes = [
            rank.passes(gathered, rank.busy_seconds(idle, clipped=clipped))
            for rank, idle in zip(kinds, waited, strict=True)
        ]
        reduced: list[float] = []
        now = 0.0
        for times in zip(*(each.final for each in passes), strict=True):
            now = max(now, *times) + self._collectives.scatter
            reduced.append(now)
        final = tuple(time - now for time in reversed(reduced))
        return _Walked(now, final, tuple(each.waited for each in passes))


def _is_same(one: _Walked, other: _Walked) -> bool:
    """Whether what follows on both is the same."""
    allowed = _SETTLED * other.seconds
    if abs(one.seconds - other.seconds) > allowed:
        return False
    return all(abs(a - b) <= allowed for a, b in zip(one.final, other.final, strict=True))


def _layer_by_layer(ranks: Sequence[RankWalk]) -> list[RankWalk]:
    """The ranks with the passes of the slowest in each layer, which all of them wait for."""
    first, last = max(rank.first for rank in ranks), max(rank.last for rank in ranks)
    middle = max(rank.middle for rank in ranks)
    return [
        replace(rank, first=first, middle=middle, last=last) if rank.last > 0.0 else rank
        for rank in ranks
    ]


def _in_rounds(
    problem: PlanProblem,
    ranks: Sequence[RankWalk],
    loads: Sequence[Load],
    fetch: tuple[float, float],
) -> list[RankWalk]:
    """The ranks with the passes of the slowest of each round, which all of them wait for.

    ``fetch``: seconds of each layer's, in forward and in backward.
    """
    layers = problem.model.num_layers
    rounds: list[float] = []
    for (_, gpu), work in zip(problem.cluster.ranks, loads, strict=True):
        sizes = micro_sizes(work.batch, work.microbatch)
        each = [size for count, size in sizes for _ in range(count)]
        seconds = [0.0] * len(each)
        for number, size in enumerate(reversed(each)):  # the last ones coincide
            once, back = micro_seconds(gpu, size, work.activations)
            once, back = max(once, fetch[0]), max(back, fetch[1])
            seconds[number] = layers * (once + back) + outside_seconds(gpu, [(1, size)])
        rounds += [0.0] * (len(seconds) - len(rounds))
        rounds[: len(seconds)] = [max(pair) for pair in zip(rounds, seconds, strict=False)]
    first, last = max(rank.first for rank in ranks), max(rank.last for rank in ranks)
    longest = max(layers * (rank.first + rank.last) + rank.middle for rank in ranks)
    middle = max(longest, sum(rounds)) - layers * (first + last)
    return [
        replace(rank, first=first, middle=max(0.0, middle), last=last) if rank.last > 0.0 else rank
        for rank in ranks
    ]


def _worker_rate(problem: PlanProblem, host: Host, shares: Sequence[Share]) -> float:
    """Parameters/s of each worker of a host, all of them busy."""
    layers = problem.model.num_layers
    busy = sum(share.fraction > 0.0 and share.gpu_layers < layers for share in shares)
    together = host.bandwidth / problem.update_bytes
    return min(host.rank_update_rate, together / max(1, busy))


def _rank(
    problem: PlanProblem,
    gpu: GpuProfile,
    passes: tuple[float, float, float],
    share: Share,
    rate: float,
    launches: StepLaunches,
) -> RankWalk:
    model = problem.model
    shard = share.fraction * model.parameters / model.num_layers
    copied = model.itemsize * shard / gpu.copy_rate
    update = shard / rate
    gpu_update = shard / gpu.update_rate
    chunk = copied * min(1.0, CHUNK_ELEMENTS / max(shard, 1.0))
    # Where the host has the weights, they come when they are gathered.
    sent, written, back = copied, 0.0, chunk
    if problem.offload_param:
        sent, written, back = 0.0, copied, 0.0
    first, middle, last = passes
    return RankWalk(
        first=first,
        middle=middle,
        last=last,
        layers=model.num_layers,
        gpu_layers=share.gpu_layers,
        gpu_update=gpu_update,
        gpu_written=gpu_update + written,
        cpu_update=max(update, copied),
        cpu_preview=max(_PREVIEW * update, sent),
        chunk=chunk,
        back=back,
        launches=launches,
    )


def _passes(
    problem: PlanProblem,
    gpu: GpuProfile,
    collectives: Collectives,
    work: Load,
    fetch: tuple[float, float],
) -> tuple[float, float, float]:
    """Seconds of a layer's first forward, of all between, of a layer's last backward.

    ``fetch``: of the weights, in forward and in backward; the first layer's of each forward is
    waited for.
    """
    layers = problem.model.num_layers
    sizes = micro_sizes(work.batch, work.microbatch)
    if not sizes:
        return 0.0, 0.0, 0.0
    # What the layers wait for outside of stage 3 is walked through here.
    here = {} if problem.stage == 3 else {"gather": 0.0, "scatter": 0.0}
    own = replace(collectives, **here)
    copy = work.offloaded / layers / gpu.copy_rate
    passes = layer_passes(problem, gpu, own, sizes, copy, work.activations, fetch)
    forwards = 1 if work.activations in LAYER_MAJOR else sum(count for count, _ in sizes)
    waited = forwards * fetch[0]
    middle = layers * passes.further + outside_seconds(gpu, sizes) + waited
    return passes.first, middle, passes.last
