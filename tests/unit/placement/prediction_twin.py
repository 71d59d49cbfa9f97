"""The slow twin of cost/prediction.py: one candidate's step, event by event."""

from __future__ import annotations

import math

from hytrain.placement.costs import StepCosts


def predict_one(costs: StepCosts, gpu_layers: int) -> float:
    """Seconds of a step with the first ``gpu_layers`` layers on the GPU, event by event.

    The same machine as :func:`~hytrain.cost.prediction.predict`'s, with a list of events.

    Args:
        costs: what each layer takes.
        gpu_layers: of 0..L.
    """
    share = costs.clipped_share
    seconds = 0.0
    if share < 1.0:
        seconds += (1.0 - share) * _step(costs, gpu_layers, clipped=False)
    if share > 0.0:
        seconds += share * _step(costs, gpu_layers, clipped=True)
    return seconds


def _step(costs: StepCosts, gpu_layers: int, *, clipped: bool) -> float:
    """From one decision on clipping, at 0, to the next."""
    layers = costs.layers
    final: dict[int, float] = {}
    now = -costs.tail
    for index, layer in enumerate(layers):
        final[index] = now
        now -= layer.backward
    weights = _worker(costs, gpu_layers, final, 0.0 if clipped else math.inf)
    now = 0.0
    for layer in layers[:gpu_layers]:
        now += layer.gpu_update
    for index, layer in enumerate(layers):
        now = max(now, weights.get(index, now)) + layer.forward
    return now + costs.between + costs.backward_seconds + costs.tail


def _worker(
    costs: StepCosts, gpu_layers: int, final: dict[int, float], decision: float
) -> dict[int, float]:
    """When the weights of each CPU-placed layer are back; ``decision``: infinite if not clipped."""
    is_clipped = math.isfinite(decision)
    waiting = {index: final[index] for index in range(gpu_layers, len(costs.layers))}
    committed: set[int] = set()
    weights: dict[int, float] = {}
    free = -math.inf
    while waiting:
        ready = [index for index, since in waiting.items() if since <= free]
        # Of several that become ready at one moment, min() takes the lowest.
        index = min(ready) if ready else min(sorted(waiting), key=lambda i: waiting[i])
        since = waiting.pop(index)
        layer = costs.layers[index]
        chunk = min(1.0, costs.chunk_elements / max(layer.parameters, 1))
        if index in committed:
            free = max(free, since) + max(layer.cpu_preview, layer.to_device)
        else:
            begin = max(free, since + layer.to_host * chunk)
            if is_clipped and begin < decision:
                free = begin + max(layer.cpu_commit, layer.to_host)
                committed.add(index)
                waiting[index] = decision
                continue
            free = begin + max(layer.cpu_update, layer.to_host, layer.to_device)
        weights[index] = free + layer.to_device * chunk
    return weights
