"""What a rank's work takes: seconds of a step, bytes of GPU and host. hytrain's own cost model.

With l = ceil(b / m) micro-batches, all charged at full size, recompute charged, per layer:

    forward   max(AG, l f(m), boundary bytes / copy rate where they are offloaded)
    backward  max(RS (+ AG in stage 3), l f(m) + l g(m) + (l - 1) accumulation, the same bytes)
    compute   L (forward + backward) + l outside(m)

In stages 1 and 2 the AG is that of the updated weights, under forward. The rank's step is as long
as the longest of these lines, a step of the job as that of its slowest rank:

    GPU       compute + GPU-placed parameters / GPU rate
    CPU       forward + backward + CPU-placed parameters / CPU rate, or 2 B each way over the copy
              rate: the worker begins with the first layer's gradient, and the last layer's forward
              follows its end
    copies    (2 B of each CPU-placed parameter + offloaded boundary bytes) / copy rate, each way
    host      all traffic of all its ranks / bandwidth of its memory

These are the limits of a step (DESIGN.md, section 8). The walk through the pipeline that training
itself solves k with is finer; a caller who has it can have the plan's step predicted by it.
Memory: 2 B a parameter of training copy (of the shard in stage 3) + 14 B a GPU-placed parameter +
C(m) + kept boundary activations; on the host 14 to 16 B a CPU-placed parameter + offloaded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.planner.cover import Floats
from hytrain.planner.problem import Activations, GpuProfile, Host, PlanProblem

TRAINING_COPY_BYTES = 2
"""Of a parameter; so much of it crosses to the host as a gradient, and back as a weight."""


@dataclass(frozen=True, slots=True)
class Load:
    """A rank's part of the batch, and what that leaves for state.

    Attributes:
        batch: samples.
        microbatch: of them at once; 0 where there are none.
        activations: policy between layers.
        forward: seconds of one layer.
        backward: seconds of one layer.
        compute: seconds of both passes.
        room: bytes of the GPU left for state, and in stage 3 for the training copy; may be
            negative.
        offloaded: bytes of activations that go to the host.
    """

    batch: int
    microbatch: int
    activations: Activations
    forward: float
    backward: float
    compute: float
    room: float
    offloaded: float

    @property
    def edge(self) -> float:
        """Seconds of a step in which the CPU worker can do nothing."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of one layer's collectives."""

    gather: float
    scatter: float

    @staticmethod
    def of(problem: PlanProblem, *, even: bool) -> Collectives:
        """Even or unequal shards; one rank has none."""
        cluster = problem.cluster
        if cluster.num_ranks == 1:
            return Collectives(0.0, 0.0)
        factor = (1.0 if even else cluster.uneven_factor) / 1e3
        size = problem.model.layer_bytes
        gather, scatter = cluster.all_gather_ms.at(size), cluster.reduce_scatter_ms.at(size)
        return Collectives(factor * gather, factor * scatter)


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
    number = -(-batch // microbatch) if batch else 0
    forward = number * gpu.forward_ms.at(microbatch) / 1e3 if batch else 0.0
    backward = forward
    peak = float(gpu.idle_bytes)
    outside = 0.0
    if batch:
        backward += number * gpu.backward_ms.at(microbatch) / 1e3
        backward += (number - 1) * problem.accumulation_ms / 1e3
        peak = gpu.peak_bytes.at(microbatch)
        if gpu.outside_ms is not None:
            outside = number * gpu.outside_ms.at(microbatch) / 1e3
    boundary = float(batch * model.num_layers * model.boundary_bytes)
    offloaded = boundary if activations == "offload" else 0.0
    copy = offloaded / model.num_layers / gpu.copy_rate
    in_backward = collectives.scatter + (collectives.gather if problem.stage == 3 else 0.0)
    forward = max(collectives.gather, forward, copy)
    backward = max(in_backward, backward, copy)
    whole = 0.0 if problem.stage == 3 else float(TRAINING_COPY_BYTES * model.parameters)
    return Load(
        batch=batch,
        microbatch=microbatch,
        activations=activations,
        forward=forward,
        backward=backward,
        compute=model.num_layers * (forward + backward) + outside,
        room=gpu.memory_bytes - peak - (boundary - offloaded) - whole,
        offloaded=offloaded,
    )


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


def lines(host: Host, gpu: GpuProfile, work: Load, on_gpu: float, on_cpu: float) -> Lines:
    """With so many parameters of state on either side."""
    copied = TRAINING_COPY_BYTES * on_cpu
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
    sharded = TRAINING_COPY_BYTES * (on_gpu + on_cpu) if problem.stage == 3 else 0.0
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
        each, room = each + TRAINING_COPY_BYTES, room - TRAINING_COPY_BYTES * on_cpu
    return np.minimum(room / each, (step - columns.compute) * gpu.update_rate)


def cpu_capacity(
    problem: PlanProblem, host: Host, gpu: GpuProfile, columns: Columns, step: float
) -> Floats:
    """Parameters of state that a rank can have updated on its host, the host's own limits apart.

    Negative where not even the activations can be copied in a step of so many seconds.
    """
    seconds = max(1.0 / host.rank_update_rate, TRAINING_COPY_BYTES / gpu.copy_rate)
    copied = (step * gpu.copy_rate - columns.offloaded) / TRAINING_COPY_BYTES
    most = np.minimum(np.maximum(0.0, step - columns.edge) / seconds, copied)
    if problem.stage == 3:
        most = np.minimum(most, np.maximum(0.0, columns.room) / TRAINING_COPY_BYTES)
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
        each = each + TRAINING_COPY_BYTES
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
