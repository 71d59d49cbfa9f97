"""The slow twin of tools/planner/step_simulator.py: a job's steps in one time, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TwinRank:
    """Seconds, as step_simulator.py describes a rank's."""

    first: float
    middle: float
    last: float
    gpu_layers: int
    gpu_update: float
    update: float
    preview: float
    chunk: float
    launches: TwinLaunches | None = None


@dataclass(frozen=True)
class TwinLaunches:
    """Of a rank's host, which nothing slows down.

    Attributes:
        updates: seconds to launch the updates on the GPU, from the decision on.
        end: then, seconds to the first kernel of forward.
        passes: seconds to launch both passes.
        device: seconds that both take on a device which need not wait for launches.
    """

    updates: float
    end: float
    passes: float
    device: float


@dataclass(frozen=True)
class TwinStep:
    """From one decision to the next.

    Attributes:
        seconds: its length.
        weights: of each rank, when each layer's were updated, counted from the step's begin.
    """

    seconds: float
    weights: list[list[float]]


@dataclass
class _Worker:
    """A rank's CPU worker between two decisions; times are of the job."""

    rank: TwinRank
    final: Sequence[float]
    decision: float
    clipped: bool

    def run(self) -> dict[int, float]:
        """When each CPU-placed layer's weights are back on the GPU."""
        layers = range(self.rank.gpu_layers, len(self.final))
        events = [(self.final[layer], f"gradient {layer}") for layer in layers]
        events.append((self.decision, "decision"))
        ready: set[int] = set()
        in_vain: set[int] = set()
        weights: dict[int, float] = {}
        busy_until = -1e300
        while len(weights) < len(layers):
            now = min(time for time, _ in events)
            happening = [what for time, what in events if time == now]
            events = [event for event in events if event[0] > now]
            for what in happening:
                if what.startswith("gradient"):
                    ready.add(int(what.split()[1]))
                elif what == "decision":
                    ready |= in_vain
            if not ready or now < busy_until:
                continue
            layer = min(ready)
            ready.remove(layer)
            if layer in in_vain:
                busy_until = now + self.rank.preview
                weights[layer] = busy_until + self.rank.chunk
            else:
                begin = max(now, self.final[layer] + self.rank.chunk)
                if self.clipped and begin < self.decision:
                    busy_until = begin + self.rank.update
                    in_vain.add(layer)
                else:
                    busy_until = begin + self.rank.update
                    weights[layer] = busy_until + self.rank.chunk
            events.append((busy_until, "free"))
        return weights


def train(
    ranks: Sequence[TwinRank],
    num_layers: int,
    gather: float,
    scatter: float,
    clipped: Sequence[bool],
) -> list[TwinStep]:
    """Steps one after another; before the first one all weights are there.

    Args:
        ranks: that train together.
        num_layers: of the model.
        gather: seconds of a layer's all-gather.
        scatter: of its reduce-scatter.
        clipped: for each step, whether the decision that it begins with was to clip.
    """
    steps: list[TwinStep] = []
    begin = 0.0
    final: list[float] | None = None
    for is_clipped in clipped:
        weights: list[list[float]] = []
        for rank in ranks:
            found = [begin] * num_layers
            if final is not None:
                for layer in range(rank.gpu_layers):
                    found[layer] = begin + (layer + 1) * rank.gpu_update
                for layer, time in _Worker(rank, final, begin, is_clipped).run().items():
                    found[layer] = time
            weights.append(found)
        final = _gradients(ranks, num_layers, gather, scatter, begin, weights)
        told = [[time - begin for time in times] for times in weights]
        steps.append(TwinStep(final[0] - begin, told))
        begin = final[0]
    return steps


def _gradients(
    ranks: Sequence[TwinRank],
    num_layers: int,
    gather: float,
    scatter: float,
    begin: float,
    weights: Sequence[Sequence[float]],
) -> list[float]:
    """When each layer's gradient is reduced, in a step that begins with these weights to come."""
    gathered: list[float] = []
    network = begin
    for layer in range(num_layers):
        network = max(network, *(times[layer] for times in weights)) + gather
        gathered.append(network)
    all_through = [_through(rank, num_layers, begin, gathered) for rank in ranks]
    final = [0.0] * num_layers
    network = begin
    for layer in reversed(range(num_layers)):
        network = max(network, *(through[layer] for through in all_through)) + scatter
        final[layer] = network
    return final


def _through(
    rank: TwinRank, num_layers: int, begin: float, gathered: Sequence[float]
) -> list[float]:
    """When its GPU has been through each layer's backward."""
    work = [(rank.first, gathered[layer], layer >= rank.gpu_layers) for layer in range(num_layers)]
    if rank.first == 0.0:
        work = [(0.0, begin, False)] * num_layers
    work += [(rank.middle, begin, False)]
    work += [(rank.last, begin, False)] * num_layers
    measured = sum(seconds for seconds, _, _ in work)
    host, updated, pace, share = begin, begin, 0.0, 1.0
    if rank.launches is not None and measured > 0.0:
        updated += rank.launches.updates
        host += rank.launches.updates + rank.launches.end
        pace = rank.launches.passes / measured
        share = rank.launches.device / measured
    device = max(updated, begin + rank.gpu_layers * rank.gpu_update)
    ends: list[float] = []
    for seconds, weights, is_by_worker in work:
        if is_by_worker:
            host = max(host, weights)
        started = host
        host = started + pace * seconds
        device = max(max(device, started, weights) + share * seconds, host)
        ends.append(device)
    return ends[: -num_layers - 1 : -1]
