"""Simulates the steps of all ranks: one model for training, `explain` and plans.

What is simulated is the time from one decision on clipping, at 0, to the next:

- GPU of a rank: the updates of the layers that are placed on it (their kernels take all of the GPU,
  so they are serial), forward of layers 0..L-1, each of which waits for its own weights,
  ``between``, backward of layers L-1..0, ``tail``. No layer ends before its host has launched
  it (``Launches``): host and GPU meet at the decision; then the host goes on to forward, while
  the GPU still updates.
- Worker of a rank, one thread: among the layers whose gradient is final it takes the lowest; if
  there is none, it waits for the next one. A job begins when the layer's first chunk is on the host
  and takes the longest of the kernel, the copy in and the copy out, which run side by side chunk by
  chunk. The weights are there when the last chunk has been copied back.
- The decision falls at the end of ``tail``, late by the part of ``tail`` that is the user's own
  code. In a clipped step, a layer whose job begins before it is only committed (``cpu_commit``) and
  is previewed by a second job (``cpu_preview``) after it; a layer whose job begins later is done in
  one (``cpu_update``). A layer that is updated late (``late_from``) has one job, after the
  decision. All that is left then competes: lowest layer first.
- A gradient is on the GPU until its layer's job has ended. If there is no room for another one,
  backward stands still until jobs have ended (:meth:`Rank.hold_back`).
- Ranks meet twice in a layer. Its gradient is final when the slowest rank's backward has passed it
  and the reduce-scatters of the layers above are through; its new weights are there when the
  slowest rank has updated its shard and the all-gathers of the layers below are through.

Every layer's forward waits for that layer's weights, so when forward has ended the worker has
nothing left to do. For one rank whose host is in time a step's length therefore depends on nothing
that came before: one simulation *is* the steady state, and the steps of a run that clips now and
then take the mean of a clipped and an unclipped step. With several ranks, how late each was carries
over to the next step; they are simulated until that repeats, clipped and other steps separately.

A step is not monotone in the worker's times: a job that ends a little later may find another
gradient there, of a layer that forward needs earlier, or fall behind the decision and need no
second job. On transformers the difference is a second pass of one layer at most.

The slow twins, event by event, are in ``tests/support/step_twins.py``.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.cost.step import Launches, LayerCosts, StepCosts

_MOST_STEPS = 4
_SETTLED = 1e-6


class Place(enum.Enum):
    """Where a layer's optimizer state is kept and updated."""

    GPU = "gpu"
    CPU = "cpu"


def first_on_gpu(number: int, num_layers: int) -> tuple[Place, ...]:
    """Places the first ``number`` of the layers on the GPU, the others on the CPU."""
    return (Place.GPU,) * number + (Place.CPU,) * (num_layers - number)


@dataclass(frozen=True, slots=True)
class _Jobs:
    """A layer's times on the CPU worker, in seconds, with copies beside the kernels."""

    first_chunk: float  # to the host
    update: float
    commit: float
    preview: float
    late: float
    last_chunk: float  # back to the GPU

    @staticmethod
    def of(layer: LayerCosts, chunk_elements: int) -> _Jobs:
        chunk = min(1.0, chunk_elements / max(layer.parameters, 1))
        return _Jobs(
            first_chunk=layer.to_host * chunk,
            update=max(layer.cpu_update, layer.to_host, layer.to_device),
            commit=max(layer.cpu_commit, layer.to_host),
            preview=max(layer.cpu_preview, layer.to_device),
            late=max(layer.cpu_late, layer.to_host, layer.to_device),
            last_chunk=layer.to_device * chunk,
        )


@dataclass(frozen=True, slots=True)
class Updates:
    """One rank's updates of a step, in seconds from its decision.

    Attributes:
        ready: when each layer's new weights are there.
        worker: how long the CPU worker is busy.
    """

    ready: list[float]
    worker: float


@dataclass(frozen=True, slots=True)
class Forward:
    """One rank's forward, in seconds from the decision before it.

    Attributes:
        device: when the GPU has ended it.
        host: when the host has launched it.
        pace: seconds of launching per second of compute.
        exposed: how long the GPU stood still for weights.
        host_waits: how long the host waited for the worker and launched nothing.
    """

    device: float
    host: float
    pace: float
    exposed: float
    host_waits: float


class Rank:
    """One rank's part of a step; equal ranks are simulated once."""

    def __init__(
        self,
        costs: StepCosts,
        places: Sequence[Place],
        launches: Launches | None = None,
        *,
        has_samples: bool = True,
    ) -> None:
        """``launches``: those of its host; None: they are always in time. ``has_samples``: whether
        it computes samples; if not, its forward waits for nothing.
        """
        self.costs = costs
        self.launches = launches or Launches()
        self.has_samples = has_samples
        # Layers of a model are mostly equal: each kind is computed once.
        kinds = {id(layer): _Jobs.of(layer, costs.chunk_elements) for layer in costs.layers}
        self._jobs = [kinds[id(layer)] for layer in costs.layers]
        self._forward = [layer.forward for layer in costs.layers]
        self._backward = [layer.backward for layer in reversed(costs.layers)]
        self._compute = costs.compute_seconds - costs.tail
        self.place(places)

    def place(self, places: Sequence[Place]) -> None:
        """Sets the layers' places, one per layer."""
        layers = self.costs.layers
        self._is_on_cpu = [place is Place.CPU for place in places]
        # Gradients become final from the last layer down.
        on_cpu = [index for index in reversed(range(len(layers))) if self._is_on_cpu[index]]
        self.num_gpu_layers = len(layers) - len(on_cpu)
        first = self._first_late = self.costs.first_late(self.num_gpu_layers)
        self._on_cpu = [index for index in on_cpu if index < first]
        self._late = [index for index in on_cpu if index >= first]
        self.gpu_update_seconds = 0.0
        for layer, is_on_cpu in zip(layers, self._is_on_cpu, strict=True):
            self.gpu_update_seconds += 0.0 if is_on_cpu else layer.gpu_update

    @property
    def late_layers(self) -> int:
        """The number of layers that the CPU updates after the decision."""
        return len(self._late)

    def final_alone(self) -> list[float]:
        """When each layer's gradient is final before a decision at 0, if there is no other rank."""
        found: list[float] = []
        now = -self.costs.tail
        for layer in self.costs.layers:
            found.append(now)
            now -= layer.backward
        return found

    def busy_seconds(self, host_waits: float, *, clipped: bool) -> float:
        """Seconds for which the worker updates while the host has something to launch.

        ``host_waits``: seconds for which the host waited for the worker.
        """
        jobs = [self._jobs[index] for index in self._on_cpu]
        seconds = sum(job.commit + job.preview if clipped else job.update for job in jobs)
        seconds += sum(self._jobs[index].late for index in self._late)
        return max(0.0, seconds - host_waits)

    def hold_back(
        self, final: Sequence[float], room: Sequence[int], *, clipped: bool
    ) -> tuple[list[float], float]:
        """When gradients are final if backward waits for room for them, and how long it waits.

        How much is left to fetch depends little on which layer is updated first: here they are
        updated in the order in which their gradients come. Late updates leave no gradient on the
        GPU for longer than its copy takes.

        Args:
            final: when each layer's gradient would be final, counted from the decision.
            room: elements of gradients that the GPU holds, once each layer's has come.
            clipped: whether the decision is to clip.

        Returns:
            when each CPU-placed layer's gradient is final, and the seconds of all waits.
        """
        found, held = list(final), 0.0
        fetched = in_flight = 0
        ends: list[float] = []
        for index in self._on_cpu:
            job = self._jobs[index]
            found[index] += held
            begin = max(ends[-1] if ends else -math.inf, found[index] + job.first_chunk)
            ends.append(begin + (job.commit if clipped else job.update))
            in_flight += self.costs.layers[index].parameters
            now = found[index]
            while fetched < len(ends) and (ends[fetched] <= now or in_flight > room[index]):
                now = max(now, ends[fetched])
                in_flight -= self.costs.layers[self._on_cpu[fetched]].parameters
                fetched += 1
            held += now - found[index]
        return [time - held for time in found], held

    def updates(self, final: Sequence[float], *, clipped: bool) -> Updates:
        """When each layer's new weights are there.

        ``final``: when each layer's gradient was final, counted from the decision, at 0;
        ``clipped``: whether the decision is to clip.
        """
        ready = [0.0] * len(final)
        now = 0.0
        for index, layer in enumerate(self.costs.layers):
            if not self._is_on_cpu[index]:
                now += layer.gpu_update + layer.write_back
                ready[index] = now
        # A late job may begin at the decision, when its gradient has long been there.
        order, coming = [*self._on_cpu, *self._late], 0
        final = [*final]
        for index in self._late:
            final[index] = max(0.0, final[index])
        waiting: list[int] = []  # whose gradient is final, the lowest first
        committed: list[int] = []  # to be previewed after the decision
        is_second = [False] * len(final)
        left, busy = len(order), 0.0
        now = final[order[0]] if order else 0.0
        while left:
            if not waiting:  # the next gradient; if all are there, the decision
                now = max(now, final[order[coming]] if coming < len(order) else 0.0)
            while coming < len(order) and final[order[coming]] <= now:
                heapq.heappush(waiting, order[coming])
                coming += 1
            if committed and now >= 0.0:
                for index in committed:
                    heapq.heappush(waiting, index)
                committed = []
            index = heapq.heappop(waiting)
            job = self._jobs[index]
            if is_second[index]:
                seconds = job.preview
            else:
                now = max(now, final[index] + job.first_chunk)
                seconds = job.update if index < self._first_late else job.late
                if clipped and now < 0.0:
                    is_second[index] = True
                    committed.append(index)
                    now += job.commit
                    busy += job.commit
                    continue
            now += seconds
            busy += seconds
            ready[index] = now + job.last_chunk
            left -= 1
        return Updates(ready, busy)

    def forward(self, weights: Sequence[float], busy: float = 0.0) -> Forward:
        """Simulates a step from a decision, at 0, through forward.

        ``weights``: when each layer's new weights are there, on all ranks; ``busy``: seconds of the
        passes for which the worker updates.
        """
        compute, launches = self._compute, self.launches
        launched = launches.passes_beside(busy, self.num_gpu_layers)
        needs = launches.device_share
        pace = launched / compute if compute > 0.0 else 0.0
        late = launches.update_seconds(self.num_gpu_layers, needs * compute - launched)
        device, host = max(self.gpu_update_seconds, late), late + launches.after_decision
        exposed = host_waits = 0.0
        if self.has_samples:
            for seconds, ready, on_cpu in zip(self._forward, weights, self._is_on_cpu, strict=True):
                now = device if device > host else host
                if ready > now:
                    exposed += ready - now
                    now = ready
                if on_cpu and ready > host:  # the host waits for the worker, too
                    host_waits += ready - host
                    host = ready
                host += pace * seconds
                device = max(now + needs * seconds, host)
        return Forward(device, host, pace, exposed, host_waits)

    def backward(self, begun: Forward) -> list[float]:
        """Simulates ``between`` and backward; returns when each layer's gradient is final."""
        device, host, needs = begun.device, begun.host, self.launches.device_share
        final: list[float] = []
        for seconds in (self.costs.between, *self._backward):
            now = device if device > host else host
            host += begun.pace * seconds
            device = max(now + needs * seconds, host)
            final.append(device)
        return final[:0:-1]


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of each layer's collectives, on their own stream beside compute.

    Attributes:
        gather: the all-gather of its new weights, before forward.
        scatter: the reduce-scatter of its gradient, after backward.
    """

    gather: Sequence[float]
    scatter: Sequence[float]


@dataclass(frozen=True, slots=True)
class Step:
    """A step, from one decision, at 0, to the next.

    Attributes:
        seconds: its length.
        final: when each layer's gradient was final, counted from the step's end.
        host_waits: for each rank, how long its host waited for its worker.
    """

    seconds: float
    final: tuple[float, ...]
    host_waits: tuple[float, ...]


def simulate(
    ranks: Sequence[Rank],
    collectives: Collectives,
    clipped_share: float,
    updating: Sequence[Rank] | None = None,
) -> float:
    """Seconds of the steady state's step.

    Args:
        ranks: one of each kind.
        clipped_share: the share of clipped steps, in [0, 1].
        updating: the ranks whose updates are waited for; None: all.
    """
    waited_for = ranks if updating is None else updating
    seconds = 0.0
    for clipped, share in ((False, 1.0 - clipped_share), (True, clipped_share)):
        if share > 0.0:
            seconds += share * _steady(ranks, collectives, waited_for, clipped=clipped)
    return seconds


def _steady(
    ranks: Sequence[Rank], collectives: Collectives, updating: Sequence[Rank], *, clipped: bool
) -> float:
    """Seconds of the steady state's step if the updates of the ranks ``updating`` are waited for.

    Ranks may take turns: one that waited long for weights begins backward late, and its gradients
    come when the worker has more time. Then the result is the mean of two steps.
    """
    at_once = [0.0] * len(ranks[0].costs.layers)
    step = simulate_step(ranks, collectives, at_once, [0.0] * len(ranks), clipped=clipped)
    seconds = step.seconds
    for _ in range(_MOST_STEPS):
        ready = [rank.updates(step.final, clipped=clipped).ready for rank in updating]
        updated = [max(times) for times in zip(*ready, strict=True)]
        before = step
        step = simulate_step(ranks, collectives, updated, before.host_waits, clipped=clipped)
        if _goes_on_alike(before, step):
            return step.seconds
        seconds = (before.seconds + step.seconds) / 2.0
    return seconds


def simulate_step(
    ranks: Sequence[Rank],
    collectives: Collectives,
    updated: Sequence[float],
    host_waits: Sequence[float],
    *,
    clipped: bool,
) -> Step:
    """Simulates a step, from a decision, at 0, to the next.

    Args:
        updated: when each layer's shards are updated.
        host_waits: seconds for which each rank's host waits for its worker.
        clipped: whether the decision is to clip.
    """
    weights: list[float] = []
    now = 0.0
    for time, seconds in zip(updated, collectives.gather, strict=True):
        now = max(now, time) + seconds
        weights.append(now)
    begun = [
        rank.forward(weights, rank.busy_seconds(waits, clipped=clipped))
        for rank, waits in zip(ranks, host_waits, strict=True)
    ]
    each = [rank.backward(forward) for rank, forward in zip(ranks, begun, strict=True)]
    final = [max(times) for times in zip(*each, strict=True)]
    now = 0.0
    for index in reversed(range(len(final))):
        now = final[index] = max(now, final[index]) + collectives.scatter[index]
    end = now + max(rank.costs.tail for rank in ranks)
    return Step(
        end, tuple(time - end for time in final), tuple(forward.host_waits for forward in begun)
    )


def _goes_on_alike(one: Step, other: Step) -> bool:
    """Whether two successive steps are alike, so that all later ones take as long as ``other``."""
    allowed = _SETTLED * other.seconds
    before = (*one.final, *one.host_waits)
    after = (*other.final, *other.host_waits)
    return all(abs(a - b) <= allowed for a, b in zip(before, after, strict=True))
