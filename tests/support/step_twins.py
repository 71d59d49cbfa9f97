"""The slow twin of hytrain.cost: steps of one rank or several, event by event on one clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.cost.simulate import Collectives, Place, Rank
from hytrain.cost.step import StepCosts


def predict_one(costs: StepCosts, gpu_layers: int) -> float:
    """Returns a step's seconds with the first ``gpu_layers`` layers on the GPU, event by event.

    Models the same machine as :func:`~hytrain.cost.prediction.predict`, by a list of events.

    Args:
        costs: each layer's times.
        gpu_layers: from 0 to L.
    """
    num_layers = len(costs.layers)
    places = [Place.GPU] * gpu_layers + [Place.CPU] * (num_layers - gpu_layers)
    none = Collectives([0.0] * num_layers, [0.0] * num_layers)
    share, seconds = costs.clipped_share, 0.0
    for is_clipped, weight in ((False, 1.0 - share), (True, share)):
        if weight > 0.0:
            steps = train([Rank(costs, places)], [places], none, [is_clipped] * 2)
            seconds += weight * steps[-1].seconds
    return seconds


@dataclass(frozen=True)
class TwinStep:
    """A step, from one decision to the next.

    Attributes:
        seconds: its length.
        weights: for each rank, when each layer's weights were updated, since the step's start.
    """

    seconds: float
    weights: list[list[float]]


def train(
    ranks: Sequence[Rank],
    places: Sequence[Sequence[Place]],
    collectives: Collectives,
    clipped: Sequence[bool],
) -> list[TwinStep]:
    """Simulates steps one after another; before the first one all weights are on the GPU.

    Of the ranks only costs, launches and ``has_samples`` are read; nothing may slow launching down.

    Args:
        ranks: the ranks that train together.
        places: the places of each rank's layers.
        collectives: the times of each layer's collectives.
        clipped: for each step, whether the decision that it begins with was to clip.
    """
    num_layers = len(places[0])
    steps: list[TwinStep] = []
    begin = 0.0
    final: list[float] | None = None
    for is_clipped in clipped:
        weights: list[list[float]] = []
        for rank, own in zip(ranks, places, strict=True):
            found, now = [begin] * num_layers, begin
            if final is not None:
                for layer, place in enumerate(own):
                    if place is Place.GPU:
                        now += rank.costs.layers[layer].gpu_update
                        found[layer] = now
                for layer, time in _events(rank.costs, own, final, begin, is_clipped).items():
                    found[layer] = time
            weights.append(found)
        final, end = _gradients(ranks, places, collectives, begin, weights)
        told = [[time - begin for time in times] for times in weights]
        steps.append(TwinStep(end - begin, told))
        begin = end
    return steps


def _events(
    costs: StepCosts,
    places: Sequence[Place],
    final: Sequence[float],
    decision: float,
    clipped: bool,
) -> dict[int, float]:
    """Returns when each CPU-placed layer's weights are back on the GPU, on the job's clock.

    For the worker, a late layer's gradient arrives no sooner than the decision.
    """
    layers = [index for index, place in enumerate(places) if place is Place.CPU]
    first_late = costs.first_late(len(places) - len(layers))
    final = [
        max(time, decision) if index >= first_late else time for index, time in enumerate(final)
    ]
    events = [(final[layer], f"gradient {layer}") for layer in layers]
    events.append((decision, "decision"))
    ready: set[int] = set()
    committed: set[int] = set()
    weights: dict[int, float] = {}
    busy_until = -math.inf
    while len(weights) < len(layers):
        now = min(time for time, _ in events)
        happening = [what for time, what in events if time == now]
        events = [event for event in events if event[0] > now]
        for what in happening:
            if what.startswith("gradient"):
                ready.add(int(what.split()[1]))
            elif what == "decision":
                ready |= committed
        if not ready or now < busy_until:
            continue
        layer = min(ready)
        ready.remove(layer)
        one = costs.layers[layer]
        chunk = min(1.0, costs.chunk_elements / max(one.parameters, 1))
        if layer in committed:
            busy_until = now + max(one.cpu_preview, one.to_device)
            weights[layer] = busy_until + chunk * one.to_device
        else:
            begin = max(now, final[layer] + chunk * one.to_host)
            if clipped and begin < decision:
                busy_until = begin + max(one.cpu_commit, one.to_host)
                committed.add(layer)
            else:
                seconds = one.cpu_late if layer >= first_late else one.cpu_update
                busy_until = begin + max(seconds, one.to_host, one.to_device)
                weights[layer] = busy_until + chunk * one.to_device
        events.append((busy_until, "free"))
    return weights


def _gradients(
    ranks: Sequence[Rank],
    places: Sequence[Sequence[Place]],
    collectives: Collectives,
    begin: float,
    weights: Sequence[Sequence[float]],
) -> tuple[list[float], float]:
    """Returns when each layer's gradient is reduced, given when weights arrive, and the end."""
    num_layers = len(places[0])
    gathered: list[float] = []
    network = begin
    for layer in range(num_layers):
        network = max(network, *(times[layer] for times in weights)) + collectives.gather[layer]
        gathered.append(network)
    all_through = [
        _through(rank, own, begin, gathered) for rank, own in zip(ranks, places, strict=True)
    ]
    final = [0.0] * num_layers
    network = begin
    for layer in reversed(range(num_layers)):
        network = max(network, *(through[layer] for through in all_through))
        network += collectives.scatter[layer]
        final[layer] = network
    return final, network + max(rank.costs.tail for rank in ranks)


def _through(
    rank: Rank, places: Sequence[Place], begin: float, gathered: Sequence[float]
) -> list[float]:
    """Returns when the rank's GPU has finished each layer's backward."""
    costs, launches = rank.costs, rank.launches
    on_gpu = [place is Place.GPU for place in places]
    work = [
        (layer.forward, gathered[index], not on_gpu[index])
        for index, layer in enumerate(costs.layers)
    ]
    if not rank.has_samples:
        work = [(0.0, begin, False)] * len(places)
    work += [(costs.between, begin, False)]
    work += [(layer.backward, begin, False) for layer in reversed(costs.layers)]
    measured = costs.compute_seconds - costs.tail
    updates = sum(x.gpu_update for x, own in zip(costs.layers, on_gpu, strict=True) if own)
    number = sum(on_gpu)
    passes = launches.passes + (launches.in_passes[number] if launches.in_passes else 0.0)
    launched = launches.on_gpu[number] if launches.on_gpu else 0.0
    share, pace = launches.device_share, passes / measured if measured > 0.0 else 0.0
    late = max(0.0, launched - max(0.0, share * measured - passes))
    host = begin + late + launches.after_decision
    device = begin + max(late, updates)
    ends: list[float] = []
    for seconds, weights, is_by_worker in work:
        if is_by_worker:
            host = max(host, weights)
        started = host
        host = started + pace * seconds
        device = max(max(device, started, weights) + share * seconds, host)
        ends.append(device)
    return ends[: -len(places) - 1 : -1]
