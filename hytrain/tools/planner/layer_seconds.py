"""Seconds of micro-batches' passes through a layer on one rank; formulas are in cost_model.py.

If weights are kept in host memory (``offload_param``), each gather of a layer begins with a copy of
this rank's part of it, on the same stream: a *fetch*, whose time is proportional to the rank's
shard. The shard is not yet known when workloads are compared. So what fetches add to a rank's
passes is given as a function of the shard (:func:`fetch_lines`): with n passes of a kind, whose
compute outlasts their collectives by h each, and fetches of x per layer, it is the sum of
n max(0, x - h), the largest of a few straight lines.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.formats.policies import LAYER_MAJOR, Activations
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.problem import PlanProblem


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of one layer's collectives, and by how much they delay compute beside them."""

    gather: float
    scatter: float
    gather_delay: float = 0.0
    scatter_delay: float = 0.0

    @staticmethod
    def of(problem: PlanProblem, *, even: bool) -> Collectives:
        """Returns the collectives of even or unequal shards; none for a single rank."""
        cluster, model = problem.cluster, problem.model
        # Frozen parameters are gathered if they are sharded, and never reduced.
        gathered = model.layer_weight_bytes if problem.stage == 3 else model.layer_bytes
        gather, scatter = cluster.collective_seconds(gathered, model.layer_bytes, even=even)
        return Collectives(
            gather, scatter, cluster.contention * gather, cluster.contention * scatter
        )


def split_batch(batch: int, microbatch: int) -> list[tuple[int, int]]:
    """Returns (how many, their samples), in order: full ones, and the last with the remainder."""
    if not batch:
        return []
    full, left = divmod(batch, microbatch)
    return [(full, microbatch)] * (full > 0) + [(1, left)] * (left > 0)


@dataclass(frozen=True, slots=True)
class LayerPasses:
    """Seconds of one layer's passes, of all micro-batches.

    Attributes:
        first: the forward that waits for the layer's new weights.
        further: the passes from then until the backward that completes the gradient; the CPU has
            no updates to make meanwhile.
        last: that backward.
    """

    first: float
    further: float
    last: float

    @property
    def total(self) -> float:
        """Both passes of all micro-batches."""
        return self.first + self.further + self.last


def layer_passes(
    problem: PlanProblem,
    gpu: GpuProfile,
    collectives: Collectives,
    sizes: Sequence[tuple[int, int]],
    copy: float,
    activations: Activations,
    fetch: tuple[float, float] = (0.0, 0.0),
) -> LayerPasses:
    """Returns one layer's passes with micro-batches of these sizes (:func:`split_batch`).

    Args:
        problem: what is planned.
        gpu: the rank's.
        collectives: of one layer.
        sizes: of the rank's micro-batches.
        copy: seconds to copy the layer's offloaded activations, each way.
        activations: policy.
        fetch: seconds to copy the layer's weights from the host, in forward and in backward.
    """
    is_sharded = problem.stage == 3
    gather = collectives.gather + fetch[0]
    sharded = gather if is_sharded else 0.0
    delay = collectives.gather_delay if is_sharded else 0.0
    scatter = collectives.scatter + (collectives.gather if is_sharded else 0.0)
    # Activations that come back share the path with weights.
    least = max(scatter, copy) + fetch[1]
    each = least if is_sharded else 0.0
    if not sizes:
        # Others need this rank's shard in every round.
        further = ((problem.rounds or 1) - 1) * (gather + least) if is_sharded else 0.0
        return LayerPasses(max(gather, copy), further, least)
    adding = [gpu.accumulation_ms.at(size) / 1e3 for _, size in sizes]
    forwards, backwards = zip(
        *(micro_seconds(gpu, size, activations) for _, size in sizes), strict=True
    )
    counts = [count for count, _ in sizes]
    if activations in LAYER_MAJOR:
        forward = sum(n * one for n, one in zip(counts, forwards, strict=True))
        backward = sum(n * one for n, one in zip(counts, backwards, strict=True))
        backward += sum(n * one for n, one in zip(counts, adding, strict=True)) - adding[-1]
        backward += collectives.scatter_delay + delay
        return LayerPasses(
            max(gather, forward + collectives.gather_delay, copy),
            0.0,
            max(least, backward),
        )
    forwards = [forward + delay for forward in forwards]
    backwards = [backward + delay for backward in backwards]
    further = 0.0
    if is_sharded:
        backwards = [backward + collectives.scatter_delay for backward in backwards]
    for count, forward, backward, add in zip(counts, forwards, backwards, adding, strict=True):
        further += count * (max(sharded, forward) + max(each, backward + add))
    further -= max(sharded, forwards[0]) + max(each, backwards[-1] + adding[-1])
    first = forwards[0] if is_sharded else forwards[0] + collectives.gather_delay
    last = backwards[-1] if is_sharded else backwards[-1] + collectives.scatter_delay
    return LayerPasses(max(gather, first), further, max(least, last))


@dataclass(frozen=True, slots=True)
class FetchLine:
    """A lower bound on what fetches add to a rank's step: ``slope`` * shard - ``hidden``.

    Attributes:
        slope: seconds per parameter of the shard.
        hidden: seconds of that which compute hides.
    """

    slope: float
    hidden: float


def fetch_lines(
    problem: PlanProblem,
    gpu: GpuProfile,
    collectives: Collectives,
    sizes: Sequence[tuple[int, int]],
    copy: float,
    activations: Activations,
) -> tuple[FetchLine, ...]:
    """Returns lines, the largest of which (or 0) is what fetches add to all passes of all layers.

    The arguments are those of :func:`layer_passes`. Every forward pass waits for its first layer:
    nothing is computed before it.
    """
    if not problem.offload_param:
        return ()
    layers, fetched = problem.model.num_layers, problem.model.weight_bytes
    forward_rate, backward_rate = gpu.fetch_rates(activations)
    forward_slope, backward_slope = fetched / forward_rate, fetched / backward_rate
    # (seconds per parameter of all passes of a kind, parameters whose fetches are hidden)
    kinds: list[tuple[float, float]] = []
    scatter = max(collectives.scatter + collectives.gather, copy)

    def add(passes: float, computed: float, *, is_forward: bool) -> None:
        waited, slope = scatter, backward_slope
        if is_forward:
            waited, slope = collectives.gather, forward_slope
        if passes:
            kinds.append((passes * slope, max(0.0, computed - waited) * layers / slope))

    rounds = (problem.rounds or 1) if not sizes else sum(count for count, _ in sizes)
    if not sizes:
        add(rounds, 0.0, is_forward=True)
        add(rounds, 0.0, is_forward=False)
    elif activations in LAYER_MAJOR:
        passes = layer_passes(problem, gpu, Collectives(0.0, 0.0), sizes, 0.0, activations)
        add(1, max(passes.first + collectives.gather_delay, copy), is_forward=True)
        delay = collectives.scatter_delay + collectives.gather_delay
        add(1, passes.last + delay, is_forward=False)
        rounds = 1
    else:
        for number, (count, size) in enumerate(sizes, 1):
            forward, backward = micro_seconds(gpu, size, activations)
            backward += collectives.gather_delay + collectives.scatter_delay
            last = int(number == len(sizes))
            add(count, forward + collectives.gather_delay, is_forward=True)
            adding = gpu.accumulation_ms.at(size) / 1e3
            add(count - last, backward + adding, is_forward=False)
            add(last, backward, is_forward=False)
    if sizes:
        kinds.append((rounds * forward_slope / layers, 0.0))
    kinds.sort(key=lambda kind: kind[1])
    slopes = itertools.accumulate(slope for slope, _ in kinds)
    hidden = itertools.accumulate(slope * free for slope, free in kinds)
    return tuple(FetchLine(*line) for line in zip(slopes, hidden, strict=True))


def fetch_seconds(
    problem: PlanProblem, gpu: GpuProfile, activations: Activations, shard: float
) -> tuple[float, float]:
    """Returns the seconds of a layer's fetch in forward and backward; ``shard``: parameters."""
    if not problem.offload_param:
        return 0.0, 0.0
    size = problem.model.weight_bytes * shard / problem.model.num_layers
    forward, backward = gpu.fetch_rates(activations)
    return size / forward, size / backward


def outside_seconds(gpu: GpuProfile, sizes: Sequence[tuple[int, int]]) -> float:
    """Returns the seconds of all micro-batches outside of the layers."""
    return sum(count * gpu.outside_ms.at(size) for count, size in sizes) / 1e3


def micro_seconds(
    gpu: GpuProfile, microbatch: int, activations: Activations
) -> tuple[float, float]:
    """Returns a layer's seconds of forward and of backward (with recomputation), one micro-batch.

    A checkpoint stops when it has what backward needs: mostly before a layer's last product. Layer
    by layer, backward starts from the layer's output, so all of the layer is recomputed.
    """
    forward, backward = gpu.forward_ms.at(microbatch), gpu.backward_ms.at(microbatch)
    if activations in LAYER_MAJOR or (activations == "recompute" and gpu.recompute_ms is None):
        backward += forward
    elif activations == "recompute":
        assert gpu.recompute_ms is not None
        backward += gpu.recompute_ms.at(microbatch)
    return forward / 1e3, backward / 1e3
