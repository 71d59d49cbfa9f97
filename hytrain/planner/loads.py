"""What a rank's work takes: seconds of a step, bytes of GPU and host. hytrain's own cost model.

A rank's b samples are l micro-batches of m, but for the last one, which has what is left. With f, g
and r their forward, backward and recomputation (0 where activations are stored), and sums over all
micro-batches, one layer takes, layer-major

    forward   max(AG, sum f + c AG, boundary bytes / copy rate where they are offloaded)
    backward  max(RS (+ AG in stage 3), sum (r + g) + (l - 1) accumulation + c RS, the same bytes)

and where micro-batches pass through the model one by one, gradients being reduced in the last
one's backward,

    forward   max(AG, f of the first + c AG) + sum of f of the others
    backward  sum of (r + g + accumulation) of all but the last + max(RS, r + g of the last + c RS)

c being the share of a collective that compute beside it misses (in stage 3, one by one, each
micro-batch waits for its own AG in forward and AG + RS in backward, and misses c of both); on the
GPU, that makes

    compute   L (forward + backward) + sum of what is outside of the layers

In stages 1 and 2 the AG is that of the updated weights, under forward. The rank's step is as long
as the longest of these lines, a step of the job as that of its slowest rank:

    GPU       compute + GPU-placed parameters / GPU rate
    CPU       edge + CPU-placed parameters / CPU rate, or 2 B each way over the copy rate. The edge
              is what the worker cannot use: it begins with the first layer's gradient, and the
              last layer's forward follows its end; micro-batches between the first and the last
              have nothing for it, unless the step is layer-major
    copies    (2 B of each CPU-placed parameter + offloaded boundary bytes) / copy rate, each way
    host      all traffic of all its ranks / bandwidth of its memory

These are the limits of a step (DESIGN.md, section 8); steps.py is finer, it walks through the steps
of all ranks together. Memory, where an element of the training copy has 2 B: 2 B a parameter (4 B a
parameter of the shard in stage 3, with its gradient) + 14 B a GPU-placed parameter + C(m) + what
the activation policy leaves there + whole gradients before they are reduced; on the host 14 to 16 B
a CPU-placed parameter + offloaded activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.planner.cover import Floats
from hytrain.planner.problem import LAYER_MAJOR, Activations, GpuProfile, Host, PlanProblem


@dataclass(frozen=True, slots=True)
class Load:
    """A rank's part of the batch, and what that leaves for state.

    Attributes:
        batch: samples.
        microbatch: of them at once; 0 where there are none.
        activations: policy between layers.
        compute: seconds of both passes of all micro-batches.
        edge: seconds of a step in which the CPU worker can do nothing.
        room: bytes of the GPU left for state, and in stage 3 for the training copy; may be
            negative.
        offloaded: bytes of activations that go to the host.
    """

    batch: int
    microbatch: int
    activations: Activations
    compute: float
    edge: float
    room: float
    offloaded: float


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of one layer's collectives, and what they take from compute beside them."""

    gather: float
    scatter: float
    gather_delay: float = 0.0
    scatter_delay: float = 0.0

    @staticmethod
    def of(problem: PlanProblem, *, even: bool) -> Collectives:
        """Even or unequal shards; one rank has none."""
        cluster = problem.cluster
        if cluster.num_ranks == 1:
            return Collectives(0.0, 0.0)
        factor = (1.0 if even else cluster.uneven_factor) / 1e3
        size = problem.model.layer_bytes
        gather, scatter = cluster.all_gather_ms.at(size), cluster.reduce_scatter_ms.at(size)
        gather, scatter = factor * gather, factor * scatter
        return Collectives(
            gather, scatter, cluster.contention * gather, cluster.contention * scatter
        )


def micro_sizes(batch: int, microbatch: int) -> list[tuple[int, int]]:
    """(how many, their samples), in order: full ones, and the last with what is left."""
    if not batch:
        return []
    full, left = divmod(batch, microbatch)
    return [(full, microbatch)] * (full > 0) + [(1, left)] * (left > 0)


def fits_rounds(problem: PlanProblem, batch: int, microbatch: int) -> bool:
    """Whether a rank with this load makes as many micro-batches as all are to make."""
    return problem.rounds is None or not batch or -(-batch // microbatch) == problem.rounds


def load(
    problem: PlanProblem,
    gpu: GpuProfile,
    collectives: Collectives,
    batch: int,
    microbatch: int,
    activations: Activations,
) -> Load:
    """What ``batch`` samples take on a GPU, ``microbatch`` at once; 0 and 0 for none."""
    model = problem.model
    sizes = micro_sizes(batch, microbatch)
    offloaded = 0.0
    if activations == "offload":
        offloaded = float(batch * model.num_layers * model.boundary_bytes)
    copy = offloaded / model.num_layers / gpu.copy_rate
    passes = layer_passes(problem, gpu, collectives, sizes, copy, activations)
    whole = 0.0 if problem.stage == 3 else float(model.itemsize * model.parameters)
    return Load(
        batch=batch,
        microbatch=microbatch,
        activations=activations,
        compute=model.num_layers * passes.total + outside_seconds(gpu, sizes),
        edge=passes.total + (model.num_layers - 1) * passes.further,
        room=gpu.memory_bytes - _peak(problem, gpu, batch, microbatch, activations) - whole,
        offloaded=offloaded,
    )


@dataclass(frozen=True, slots=True)
class LayerPasses:
    """Seconds of one layer, of all micro-batches.

    Attributes:
        first: forward that waits for the layer's new weights.
        further: what follows until the backward that gives the gradient; the CPU has no updates
            to make then.
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
) -> LayerPasses:
    """One layer's passes with micro-batches of these sizes (:func:`micro_sizes`).

    ``copy``: seconds for which its offloaded activations are copied, each way.
    """
    is_sharded = problem.stage == 3
    sharded = collectives.gather if is_sharded else 0.0
    delay = collectives.gather_delay if is_sharded else 0.0
    least = max(collectives.scatter + sharded, copy)
    each = least if is_sharded else 0.0
    if not sizes:
        return LayerPasses(max(collectives.gather, copy), 0.0, least)
    adding = [accumulation_seconds(problem, gpu, size) for _, size in sizes]
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
            max(collectives.gather, forward + collectives.gather_delay, copy),
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
    return LayerPasses(max(collectives.gather, first), further, max(least, last))


def outside_seconds(gpu: GpuProfile, sizes: Sequence[tuple[int, int]]) -> float:
    """Seconds outside of the layers, of all micro-batches."""
    if gpu.outside_ms is None:
        return 0.0
    return sum(count * gpu.outside_ms.at(size) for count, size in sizes) / 1e3


def accumulation_seconds(problem: PlanProblem, gpu: GpuProfile, microbatch: int) -> float:
    """Seconds by which a layer's backward is longer where its gradient is added to others."""
    if gpu.accumulation_ms is None:
        return problem.accumulation_ms / 1e3
    return gpu.accumulation_ms.at(microbatch) / 1e3


def micro_seconds(
    gpu: GpuProfile, microbatch: int, activations: Activations
) -> tuple[float, float]:
    """Seconds of one layer's forward and backward of one micro-batch, recomputation included."""
    forward, backward = gpu.forward_ms.at(microbatch), gpu.backward_ms.at(microbatch)
    if activations != "store":
        again = forward if gpu.recompute_ms is None else gpu.recompute_ms.at(microbatch)
        backward += again
    return forward / 1e3, backward / 1e3


def _peak(
    problem: PlanProblem, gpu: GpuProfile, batch: int, microbatch: int, activations: Activations
) -> float:
    """Bytes of the GPU's peak beside training copy and state."""
    model = problem.model
    gradients = float(problem.gradient_bytes * model.parameters)
    if not batch:
        return float(gpu.idle_bytes)
    working = gpu.peak_bytes.at(microbatch)
    boundary = float(model.num_layers * model.boundary_bytes)
    if activations == "store":
        assert gpu.stored_bytes is not None, "checked by the problem"
        peak = gpu.stored_bytes.at(microbatch)
    elif activations == "recompute":
        peak = working + microbatch * boundary
    elif activations == "keep":
        peak = working + batch * boundary
    else:
        peak = working
    if problem.stage == 3:
        return peak  # gradients are reduced as they come, in every backward
    if activations not in LAYER_MAJOR and batch > microbatch:
        return peak + gradients  # they wait for the last micro-batch
    if problem.cluster.num_ranks > 1 or activations in LAYER_MAJOR:
        # The first backward keeps them until it ends, when all activations are gone.
        return max(peak, working + gradients)
    return peak


@dataclass(frozen=True, slots=True)
class Lines:
    """Seconds of each limit of a rank's step."""

    gpu: float
    cpu: float
    copies: float

    @property
    def longest(self) -> float:
        """The rank's step, but for its host's bandwidth."""
        return max(self.gpu, self.cpu, self.copies)


def lines(
    problem: PlanProblem, host: Host, gpu: GpuProfile, work: Load, on_gpu: float, on_cpu: float
) -> Lines:
    """With so many parameters of state on either side."""
    copied = problem.model.itemsize * on_cpu
    cpu = max(on_cpu / host.rank_update_rate, copied / gpu.copy_rate)
    return Lines(
        gpu=work.compute + on_gpu / gpu.update_rate,
        cpu=work.edge + cpu if on_cpu > 0.0 else 0.0,
        copies=(copied + work.offloaded) / gpu.copy_rate,
    )


def traffic(problem: PlanProblem, work: Load, on_cpu: float) -> float:
    """Bytes that a rank's step moves in its host's memory: updates, activations out and in."""
    return problem.update_bytes * on_cpu + 2.0 * work.offloaded


def host_bytes(problem: PlanProblem, work: Load, on_cpu: float) -> float:
    """What a rank keeps in its host's memory."""
    return problem.host_state_bytes * on_cpu + work.offloaded


def gpu_bytes(
    problem: PlanProblem, gpu: GpuProfile, work: Load, on_gpu: float, on_cpu: float
) -> float:
    """The peak of a rank's GPU."""
    sharded = problem.sharded_bytes * (on_gpu + on_cpu)
    return gpu.memory_bytes - work.room + sharded + problem.gpu_state_bytes * on_gpu


@dataclass(frozen=True, slots=True)
class Columns:
    """Many loads of one GPU, a column for each of their numbers (see :class:`Load`)."""

    compute: Floats
    edge: Floats
    room: Floats
    offloaded: Floats

    @staticmethod
    def of(loads: Sequence[Load]) -> Columns:
        """The loads in their order."""
        return Columns(
            compute=np.array([work.compute for work in loads]),
            edge=np.array([work.edge for work in loads]),
            room=np.array([work.room for work in loads]),
            offloaded=np.array([work.offloaded for work in loads]),
        )


def gpu_capacity(
    problem: PlanProblem,
    gpu: GpuProfile,
    columns: Columns,
    step: float,
    on_cpu: Floats | float = 0.0,
) -> Floats:
    """Parameters of state that a GPU can keep and update in a step of so many seconds.

    In stage 3 the CPU-placed part of the shard takes room, too. Negative where nothing fits.
    """
    each, room = problem.gpu_state_bytes, columns.room
    if problem.stage == 3:
        sharded = problem.sharded_bytes
        each, room = each + sharded, room - sharded * on_cpu
    return np.minimum(room / each, (step - columns.compute) * gpu.update_rate)


def cpu_capacity(
    problem: PlanProblem, host: Host, gpu: GpuProfile, columns: Columns, step: float
) -> Floats:
    """Parameters of state that a rank can have updated on its host, the host's own limits apart.

    Negative where not even the activations can be copied in a step of so many seconds.
    """
    itemsize = problem.model.itemsize
    seconds = max(1.0 / host.rank_update_rate, itemsize / gpu.copy_rate)
    copied = (step * gpu.copy_rate - columns.offloaded) / itemsize
    most = np.minimum(np.maximum(0.0, step - columns.edge) / seconds, copied)
    if problem.stage == 3:
        most = np.minimum(most, np.maximum(0.0, columns.room) / problem.sharded_bytes)
    return most


def largest_shards(
    problem: PlanProblem, host: Host, gpu: GpuProfile, columns: Columns, step: float
) -> Floats:
    """Parameters of the largest shard, of whole layers: a row a load, a column a number 0..L.

    The number is that of the layers that the GPU updates; the host's own limits are left apart.
    Negative in all columns where a load itself takes longer than the step.
    """
    num_layers = problem.model.num_layers
    gpu_part = np.arange(num_layers + 1) / num_layers
    on_gpu = (step - columns.compute)[:, None] * gpu.update_rate
    on_cpu = cpu_capacity(problem, host, gpu, columns, step)[:, None]
    each = problem.gpu_state_bytes * gpu_part
    if problem.stage == 3:
        each = each + problem.sharded_bytes
    room = columns.room[:, None]
    unlimited = np.full((len(columns.room), num_layers + 1), np.inf)
    shards = np.divide(room, each, out=unlimited.copy(), where=each > 0.0)
    shards = np.minimum(
        shards, np.divide(on_gpu, gpu_part, out=unlimited.copy(), where=gpu_part > 0.0)
    )
    cpu_part = 1.0 - gpu_part
    shards = np.minimum(shards, np.divide(on_cpu, cpu_part, out=unlimited, where=cpu_part > 0.0))
    possible = (room >= 0.0) & (on_gpu >= 0.0) & (on_cpu >= 0.0)
    return np.where(possible, shards, -1.0)


def host_capacity(problem: PlanProblem, host: Host, step: float) -> tuple[float, float]:
    """Parameters of state that a host can hold, and that its bandwidth can update in a step."""
    held = host.memory_bytes / problem.host_state_bytes
    return held, step * host.bandwidth / problem.update_bytes


def host_draw(problem: PlanProblem, offloaded: Floats) -> tuple[Floats, Floats]:
    """What offloaded activations take of both, in parameters."""
    return offloaded / problem.host_state_bytes, 2.0 * offloaded / problem.update_bytes
