"""hytrain's own cost model: what a rank's work takes in seconds of a step, bytes of GPU and host.

A rank's b samples are l micro-batches of m, but the last one has the remainder. With f, g and r
their forward, backward and recomputation (0 if activations are stored), and sums over all
micro-batches, one layer takes, layer-major

    forward   max(AG, sum f + c AG, boundary bytes / copy rate if they are offloaded)
    backward  max(RS (+ AG in stage 3), sum (r + g) + (l - 1) accumulation + c RS, the same bytes)

and if micro-batches pass through the model one by one, with gradients reduced in the last one's
backward,

    forward   max(AG, f of the first + c AG) + sum of f of the others
    backward  sum of (r + g + accumulation) of all but the last + max(RS, r + g of the last + c RS)

where c is the share of a collective's time that compute beside it loses (in stage 3, one by one,
each micro-batch waits for its own AG in forward and AG + RS in backward, and loses c of both). On
the GPU this makes

    compute   L (forward + backward) + sum of what is outside of the layers

In stages 1 and 2 the AG is that of the updated weights, beside forward. The rank's step is the
longest of these bounds, the job's step that of its slowest rank:

    GPU       compute + GPU-placed parameters / GPU rate
    CPU       startup + CPU-placed parameters / CPU rate, or 2 B each way over the copy rate. The
              startup is time that the worker cannot use: its work begins with the first final
              gradient, and ends before the forward of its last layer; micro-batches between the
              first and the last have no work for it, unless the step is layer-major
    copies    (2 B of each CPU-placed parameter + offloaded boundary bytes) / copy rate, each way
    host      traffic of all ranks of the host / bandwidth of its memory

With weights in host memory (stage 3, ``offload_param``) a rank's shard of a layer is copied from
there before each gather: AG becomes AG + fetch, in forward and in backward, and every forward waits
for the first layer's fetch (layer_seconds.py). The copies to the host then include the new training
copies of GPU-placed parameters; those of CPU-placed ones are written there.

These are the roofline bounds of a step (docs/internals.md); planned_step.py is finer: it simulates
the steps of all ranks together. GPU memory, if an element of the training copy has 2 B, is 2 B per
parameter (in stage 3 4 B per parameter of the shard, with its gradient) + 12 B per GPU-placed
parameter + the larger of the peaks in the passes and at the end of backward:

    passes    C(m) + what the activation policy keeps there + whole gradients before they are
              reduced (one by one: beside every micro-batch but the first)
    end       C(m) + 2 B per GPU-placed parameter, whose gradient waits for the outcome

On the host it is 14 to 16 B per CPU-placed parameter + offloaded activations + with
``offload_param`` 2 B per parameter of the shard, which then are not on the GPU.

Frozen parameters are weights and nothing else. They are sharded as the trained ones are, and
counted with them: where weights are kept, gathered or fetched, a trained parameter has 2 B times
the ratio of all parameters of the model to the trained ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hytrain.formats.policies import LAYER_MAJOR, Activations
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.layer_seconds import (
    Collectives,
    FetchLine,
    fetch_lines,
    layer_passes,
    outside_seconds,
    split_batch,
)
from hytrain.tools.planner.problem import Floats, PlanProblem

_Number = TypeVar("_Number", float, Floats)


@dataclass(frozen=True, slots=True)
class Workload:
    """A rank's part of the batch, and what that leaves for state.

    Attributes:
        microbatch: samples that are computed at once; 0 if there are none.
        activations: activation policy.
        compute: seconds of both passes of all micro-batches.
        startup: seconds of a step in which the CPU worker can do nothing.
        room: GPU bytes left for state, and in stage 3 for the training copy, during the passes;
            may be negative.
        end_room: the same at the end of backward, for waiting gradients as well; at least ``room``.
        offloaded: bytes of activations that go to the host.
        fetches: what fetching its weights from the host adds to ``compute``, by its shard.
    """

    batch: int
    microbatch: int
    activations: Activations
    compute: float
    startup: float
    room: float
    end_room: float
    offloaded: float
    fetches: tuple[FetchLine, ...] = ()

    def fetching(self, shard: float) -> float:
        """Returns the seconds that fetches add to the passes with a shard of so many parameters."""
        return max((line.slope * shard - line.hidden for line in self.fetches), default=0.0)


def fits_rounds(problem: PlanProblem, batch: int, microbatch: int) -> bool:
    """Whether a rank with this workload makes as many micro-batches as all ranks must."""
    return problem.rounds is None or not batch or -(-batch // microbatch) == problem.rounds


def sizes_to_choose(problem: PlanProblem, gpu: GpuProfile, samples: int) -> Sequence[int]:
    """Returns the micro-batch sizes in which a rank may compute ``samples``.

    Those of the profile; any up to the largest of them if all ranks make equally many
    micro-batches, since few multiples of a number of rounds would sum to the batch.
    """
    if problem.rounds is None:
        return gpu.micro_batches(samples)
    largest = samples if gpu.sizes is None else gpu.sizes[-1]
    return range(1, min(samples, largest) + 1)


def workload(
    problem: PlanProblem,
    gpu: GpuProfile,
    collectives: Collectives,
    batch: int,
    microbatch: int,
    activations: Activations,
) -> Workload:
    """Returns what ``batch`` samples take on a GPU, ``microbatch`` at once; 0 and 0 for none."""
    model = problem.model
    sizes = split_batch(batch, microbatch)
    offloaded = 0.0
    if activations == "offload":
        offloaded = float(batch * model.num_layers * model.boundary_bytes)
    copy = offloaded / model.num_layers / gpu.copy_rate
    passes = layer_passes(problem, gpu, collectives, sizes, copy, activations)
    whole = 0.0 if problem.stage == 3 else model.weight_bytes * model.parameters
    peak, end = peaks(problem, gpu, batch, microbatch, activations)
    return Workload(
        batch=batch,
        microbatch=microbatch,
        activations=activations,
        compute=model.num_layers * passes.total + outside_seconds(gpu, sizes),
        startup=passes.total + (model.num_layers - 1) * passes.further,
        room=gpu.memory_bytes - peak - whole,
        end_room=gpu.memory_bytes - end - whole,
        offloaded=offloaded,
        fetches=fetch_lines(problem, gpu, collectives, sizes, copy, activations),
    )


class WorkloadMaker:
    """Makes the workloads of a problem, each once."""

    def __init__(self, problem: PlanProblem, collectives: Collectives) -> None:
        """The arguments are those of :func:`workload`."""
        self._problem = problem
        self._collectives = collectives
        # By the profile's id: comparing profiles takes long.
        self._known: dict[tuple[int, int, int, Activations], Workload] = {}

    def of(self, gpu: GpuProfile, batch: int, size: int, policy: Activations) -> Workload:
        """See :func:`workload`."""
        key = id(gpu), batch, size, policy
        if key not in self._known:
            self._known[key] = workload(self._problem, gpu, self._collectives, batch, size, policy)
        return self._known[key]


def roofline(
    problem: PlanProblem, host: Host, gpu: GpuProfile, work: Workload, on_gpu: float, on_cpu: float
) -> dict[str, float]:
    """Returns the seconds of each bound of a rank's step, except its host's bandwidth.

    ``on_gpu``, ``on_cpu``: parameters whose state is there.
    """
    copied = problem.model.itemsize * on_cpu
    written = problem.written_bytes * on_gpu
    cpu = max(on_cpu / host.rank_update_rate, copied / gpu.copy_rate)
    return {
        "gpu": work.compute + work.fetching(on_gpu + on_cpu) + on_gpu / gpu.update_rate,
        "cpu": work.startup + cpu if on_cpu > 0.0 else 0.0,
        "copies": (copied + written + work.offloaded) / gpu.copy_rate,
    }


def traffic(problem: PlanProblem, on_gpu: _Number, on_cpu: _Number, offloaded: _Number) -> _Number:
    """Returns the bytes a rank's step moves in its host's memory: updates, activations, weights.

    ``on_gpu``, ``on_cpu``: parameters placed there; ``offloaded``: bytes of activations.
    """
    weights = problem.shard_traffic * (on_gpu + on_cpu)
    return problem.state_traffic * on_cpu + weights + 2.0 * offloaded


def host_bytes(
    problem: PlanProblem, on_gpu: _Number, on_cpu: _Number, offloaded: _Number
) -> _Number:
    """Returns the bytes a rank keeps in its host's memory; arguments as for :func:`traffic`."""
    weights = problem.host_weight_bytes * (on_gpu + on_cpu)
    return problem.host_state_bytes * on_cpu + weights + offloaded


def host_parts(
    problem: PlanProblem,
    host: Host,
    step: float,
    on_gpu: Floats,
    on_cpu: Floats,
    offloaded: Floats,
) -> Floats:
    """Returns the shares that ranks take: of the host's memory (row 0), of its traffic (row 1)."""
    moved = traffic(problem, on_gpu, on_cpu, offloaded) / (step * host.bandwidth)
    held = host_bytes(problem, on_gpu, on_cpu, offloaded)
    # A host without memory has nothing for anyone.
    has = float(host.memory_bytes)
    return np.array([held / has if has else np.where(held > 0.0, 2.0**20, 0.0), moved])


def gpu_bytes(
    problem: PlanProblem, gpu: GpuProfile, work: Workload, on_gpu: float, on_cpu: float
) -> float:
    """Returns the peak bytes of a rank's GPU."""
    shard = problem.sharded_bytes * (on_gpu + on_cpu) + problem.gpu_state_bytes * on_gpu
    return gpu.memory_bytes + shard - min(work.room, work.end_room - problem.waiting_bytes * on_gpu)


def gpu_layers_that_fit(problem: PlanProblem, work: Workload, shard: float) -> int:
    """Returns how many layers of a shard of so many parameters fit on the GPU; -1: not even 0."""
    model = problem.model
    each = problem.gpu_state_bytes * shard
    if each <= 0.0:
        return model.num_updates
    sharded = problem.sharded_bytes * shard
    at_end = each + problem.waiting_bytes * shard
    fitting = min((work.room - sharded) / each, (work.end_room - sharded) / at_end)
    return bisect.bisect_right(range(model.num_updates + 1), fitting, key=model.gpu_part) - 1


def largest_shards(
    problem: PlanProblem, host: Host, gpu: GpuProfile, workloads: Sequence[Workload], step: float
) -> Floats:
    """Returns the parameters of the largest shard by workload (row) and GPU layers 0..L (column).

    GPU layers are whole layers that the GPU updates. The host's own limits are not applied.
    Negative in all columns if a workload by itself does not fit or takes longer than the step.
    """
    rows = [(w.compute, w.startup, w.room, w.end_room, w.offloaded) for w in workloads]
    compute, startup, room, end_room, offloaded = np.array(rows).reshape(-1, 5).T[:, :, None]
    itemsize, gpu_part = problem.model.itemsize, problem.model.gpu_parts
    on_gpu = (step - compute) * gpu.update_rate
    seconds = max(1.0 / host.rank_update_rate, itemsize / gpu.copy_rate)
    copied = (step * gpu.copy_rate - offloaded) / itemsize
    on_cpu = np.minimum(np.maximum(0.0, step - startup) / seconds, copied)
    each = problem.gpu_state_bytes * gpu_part + problem.sharded_bytes
    at_end = each + problem.waiting_bytes * gpu_part
    shards = np.full((len(rows), len(gpu_part)), np.inf)
    limits = (room, each), (end_room, at_end), (on_gpu, gpu_part), (on_cpu, 1.0 - gpu_part)
    for has, taken in limits:
        unlimited = np.full_like(shards, np.inf)
        shards = np.minimum(shards, np.divide(has, taken, out=unlimited, where=taken > 0.0))
    if problem.offload_param:
        # Backward alone fetches as much from the host as goes there, as fast: no further limit.
        shards = np.minimum(shards, _fetched(workloads, step, gpu_part / gpu.update_rate))
    possible = (room >= 0.0) & (on_gpu >= 0.0) & (on_cpu >= 0.0)
    return np.where(possible, shards, -1.0)


def _fetched(workloads: Sequence[Workload], step: float, seconds: Floats) -> Floats:
    """Returns the parameters of the largest shard that is fetched in time, by workload of one GPU
    and by ``seconds``, the time that each parameter of the shard takes besides."""
    most = max((len(work.fetches) for work in workloads), default=0)
    lines = [(work.fetches * most)[:most] for work in workloads]  # as many of each: some repeat
    shape = len(workloads), most, 1
    slope = np.array([line.slope for own in lines for line in own]).reshape(shape) + seconds
    hidden = np.array([line.hidden for own in lines for line in own]).reshape(shape)
    compute = np.array([work.compute for work in workloads])[:, None, None]
    time = np.broadcast_to(step - compute + hidden, slope.shape)
    largest = np.where(time >= 0.0, np.inf, -1.0)
    return np.divide(time, slope, out=largest, where=slope > 0.0).min(axis=1)


def longest_step(
    problem: PlanProblem, host: Host, gpu: GpuProfile, workloads: Sequence[Workload]
) -> float:
    """Returns the seconds beyond which a longer step lets a rank do or hold no more."""
    whole = problem.model.parameters
    slopes = (line.slope for work in workloads for line in work.fetches)
    copied = problem.model.itemsize * whole + max(work.offloaded for work in workloads)
    copies = copied / gpu.copy_rate + whole * max(slopes, default=0.0)
    updates = whole / gpu.update_rate + whole / host.rank_update_rate
    moved = (problem.state_traffic + problem.shard_traffic) * whole / host.bandwidth
    return 2.0 * max(work.compute for work in workloads) + copies + updates + moved


def peaks(
    problem: PlanProblem, gpu: GpuProfile, batch: int, microbatch: int, activations: Activations
) -> tuple[float, float]:
    """Returns GPU bytes beside training copy, state and shards: peak in the passes, and at the end.

    The end is that of backward, with the lowest layer's activations; the logits are gone by then.
    Peaks of H200s were within 2.5 % of the larger of both, state and shards added
    (experiments/unequal_gpus, 149 peaks, all policies but "offload").
    """
    model = problem.model
    if not batch:
        # To reductions of several ranks it contributes a layer of zeros.
        zeros = 0.0
        if problem.cluster.num_ranks > 1:
            zeros = problem.gradient_bytes * model.parameters / model.num_layers
        return gpu.idle_bytes + zeros, gpu.idle_bytes + zeros
    end = gpu.layer_peak(microbatch)
    if activations in LAYER_MAJOR:
        end += batch * float(model.boundary_bytes)
    return max(end, _passes_peak(problem, gpu, batch, microbatch, activations)), end


def _passes_peak(
    problem: PlanProblem, gpu: GpuProfile, batch: int, microbatch: int, activations: Activations
) -> float:
    model = problem.model
    gradients = 0.0
    if problem.stage != 3:  # there each is reduced at once, in every backward
        gradients = float(problem.gradient_bytes * model.parameters)
    # All gradients are whole when backward has come to the lowest layer.
    whole = gpu.layer_peak(microbatch) + gradients
    working = gpu.peak_bytes.at(microbatch)
    boundary = float(model.num_layers * model.boundary_bytes)
    if activations == "keep":
        return max(working + batch * boundary, whole)
    if activations == "offload":
        return max(working, whole)

    def stored(samples: int) -> float:
        if activations == "recompute":
            return gpu.peak_bytes.at(samples) + samples * boundary
        assert gpu.stored_bytes is not None, "checked by the problem"
        return gpu.stored_bytes.at(samples)

    peak = stored(min(batch, microbatch))
    if batch > microbatch:
        # Whole gradients wait for the last micro-batch, beside all that the second one leaves.
        return max(peak, stored(min(batch - microbatch, microbatch)) + gradients, whole)
    if problem.cluster.num_ranks > 1:
        # The first backward keeps them until it ends, when all activations are gone.
        return max(peak, whole)
    return peak
