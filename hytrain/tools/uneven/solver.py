"""Uneven data parallel: which GPU computes how much of the batch. Exact, and fast.

The problem is Cephalo's (Guo et al., "Cephalo: Harnessing Heterogeneous GPU Clusters for Training
Transformer Models"): one sharded-data-parallel job over GPUs that differ in speed and memory. Per
transformer layer, with micro-batches of m samples and l = ceil(b / m) of them for b samples:

    forward   F = max(AG, l f(m))
    backward  B = max(AG + RS, l f(m) + l g(m) + (l - 1) * accumulation)     recompute charged
    minimise max_i (F_i + B_i)  subject to  sum b_i = batch,
        C(m_i) <= 0.75 capacity_i,  sum C(m_i) + 16 B * parameters < 0.75 * sum capacity_i

All l micro-batches are charged at full size. AG and RS are times 1.25 for a GPU whose C(m) leaves
no room for an even shard of the state.

The published solver (a dynamic program over GPUs, batch and the sum of micro-batch sizes,
O(N B^3)) has faults that are not repeated here:

- Where nothing fits it returns a plan all the same, the first that it meets, without a word. Here
  that is an :class:`Infeasible`, which says what is missing.
- Every GPU must compute at least one sample. That is this problem's default, so that optima can be
  compared; ``allow_idle`` lifts it.
- It considers batches that are multiples of the micro-batch only, and takes the sum of micro-batch
  sizes for the memory, which is right only where every GPU's C is the same straight line.

This solver tries times: those that a GPU can take are finitely many. For one of them, a GPU with
micro-batches of m covers some number of samples at the cost C(m); the least memory at which all
together cover the batch is a sum of step functions (min_plus.py). The least time at which that is
within the budget is the optimum. Times in ms, memory in GiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.planner.curves import Curve
from hytrain.tools.planner.min_plus import Floats, Ints, StepFunction, cheapest, least_cost
from hytrain.tools.planner.shards import water_fill

_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class UnevenGpu:
    """One GPU. GPUs that compare equal are one type, whose options are listed once.

    Attributes:
        name: its type's.
        forward: one layer's forward against the micro-batch size, ms.
        backward: one layer's backward, without recompute, ms.
        memory: C, the peak of everything but the sharded state, GiB.
        capacity: its memory, GiB.
        idle_memory: C of a GPU that computes nothing and takes part in collectives, GiB.
    """

    name: str
    forward: Curve
    backward: Curve
    memory: Curve
    capacity: float
    idle_memory: float = 2.0


@dataclass(frozen=True, slots=True)
class UnevenProblem:
    """A batch to be dealt to GPUs.

    Attributes:
        gpus: one entry a GPU.
        batch: samples of the global batch.
        parameters: of the model.
        all_gather: AG of one evenly sharded layer, ms.
        reduce_scatter: RS of one evenly sharded layer, ms.
        accumulation: what each further micro-batch adds to a layer's backward, ms.
        usable: share of a GPU's memory that may be used.
        state_bytes: bytes a parameter of sharded state.
        uneven_factor: what unequal shards cost in collectives.
        allow_idle: whether a GPU may compute nothing.

    Raises:
        PlanError: no GPU, or a number out of its range.
    """

    gpus: tuple[UnevenGpu, ...]
    batch: int
    parameters: int
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    accumulation: float = 10.0
    usable: float = 0.75
    state_bytes: int = 16
    uneven_factor: float = 1.25
    allow_idle: bool = False

    def __post_init__(self) -> None:
        if not self.gpus:
            raise PlanError("a plan needs at least one GPU")
        if self.batch < 1 or self.parameters < 1:
            raise PlanError(
                f"a batch of {self.batch} samples, {self.parameters} parameters: both must be "
                "positive"
            )
        for name in ("all_gather", "reduce_scatter", "accumulation"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} must not be negative, got {getattr(self, name)}")
        for gpu in dict.fromkeys(self.gpus) if self.allow_idle else ():
            if gpu.idle_memory > float(gpu.memory.upto(self.batch).min()):
                raise PlanError(
                    f"{gpu.name} needs {gpu.idle_memory} GiB where it computes nothing, and less "
                    "where it computes: lower idle_memory"
                )

    @property
    def state(self) -> float:
        """GiB of sharded state, all ranks together."""
        return self.state_bytes * self.parameters / _GIB

    @property
    def budget(self) -> float:
        """GiB that the C of all GPUs together must stay below."""
        return self.usable * sum(gpu.capacity for gpu in self.gpus) - self.state


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Nothing fits, in words, and how much is missing.

    Attributes:
        reason: for people; names what is missing, and where.
        missing: GiB; 0 where it is not memory that is missing.
        gpu: the first GPU that lacks it; None where all together do.
        is_close: it is not proven that nothing fits, but nothing was found.
    """

    reason: str
    missing: float = 0.0
    gpu: int | None = None
    is_close: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """An optimum: of all plans with the least time, one with the least memory.

    Attributes:
        time: of the slowest GPU, one layer's forward and backward, ms.
        batch_sizes: samples of each GPU.
        microbatch_sizes: of each GPU; 0 for one that computes nothing.
        memory: C of all GPUs together, GiB.
        probes: how many times were tried.
    """

    time: float
    batch_sizes: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    memory: float
    probes: int

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Of each GPU."""
        pairs = zip(self.batch_sizes, self.microbatch_sizes, strict=True)
        return tuple(-(-batch // size) if size else 0 for batch, size in pairs)


def layer_time(
    problem: UnevenProblem, gpu: UnevenGpu, microbatch: int, num_microbatches: int
) -> float:
    """T = F + B of one layer on one GPU, ms (Cephalo's formula, see the module).

    ``microbatch`` 0 is a GPU that computes nothing: it takes part in the collectives.
    """
    gather, scatter = problem.all_gather, problem.reduce_scatter
    if microbatch == 0:
        return gather + (gather + scatter)
    if _exceeds_even_shard(problem, gpu, microbatch):
        gather, scatter = gather * problem.uneven_factor, scatter * problem.uneven_factor
    forward = num_microbatches * gpu.forward.at(microbatch)
    backward = num_microbatches * gpu.backward.at(microbatch)
    backward += (num_microbatches - 1) * problem.accumulation
    return max(gather, forward) + max(gather + scatter, forward + backward)


def _exceeds_even_shard(problem: UnevenProblem, gpu: UnevenGpu, microbatch: int) -> bool:
    room = problem.usable * gpu.capacity - problem.state / len(problem.gpus)
    return gpu.memory.at(microbatch) > room


@dataclass(frozen=True, slots=True)
class _Options:
    """What a type of GPU can do, a row for each micro-batch size that fits.

    Attributes:
        sizes: the micro-batch sizes.
        memory: C of each.
        starts: where each row begins in ``times``.
        times: row by row: the times of 1, 2, ... micro-batches, until they cover the batch.
    """

    sizes: Ints
    memory: Floats
    starts: Ints
    times: Floats

    def steps(self, time: float, batch: int, idle: float | None) -> StepFunction:
        """(samples, memory) within a time; labels are micro-batch sizes."""
        sizes, memory, amounts = self.sizes, self.memory, self.sizes
        if len(sizes):
            numbers = np.add.reduceat((self.times <= time).astype(np.intp), self.starts)
            amounts = np.minimum(sizes * numbers, batch)
            able = amounts > 0
            sizes, amounts, memory = sizes[able], amounts[able], memory[able]
        if idle is not None:
            sizes, amounts = np.append(sizes, 0), np.append(amounts, 0)
            memory = np.append(memory, idle)
        if not len(sizes):
            return StepFunction(sizes, memory, sizes)
        steps = StepFunction.pareto(amounts, memory)
        return StepFunction(steps.amounts, steps.costs, sizes[steps.labels])


def _options(problem: UnevenProblem, gpu: UnevenGpu) -> _Options:
    batch = problem.batch
    memory = gpu.memory.upto(batch)
    fits = memory <= problem.usable * gpu.capacity
    sizes, memory = np.arange(1, batch + 1)[fits], memory[fits]
    most = -(-batch // sizes)
    starts = np.concatenate([np.zeros(1, dtype=np.intp), np.cumsum(most)])
    numbers = np.arange(1, int(starts[-1]) + 1) - np.repeat(starts[:-1], most)
    room = problem.usable * gpu.capacity - problem.state / len(problem.gpus)
    factor = np.repeat(np.where(memory > room, problem.uneven_factor, 1.0), most)
    gather, scatter = problem.all_gather * factor, problem.reduce_scatter * factor
    forwards = numbers * np.repeat(gpu.forward.upto(batch)[fits], most)
    backwards = numbers * np.repeat(gpu.backward.upto(batch)[fits], most)
    backwards += (numbers - 1) * problem.accumulation
    times = np.maximum(gather, forwards) + np.maximum(gather + scatter, forwards + backwards)
    return _Options(sizes, memory, starts[:-1], times)


class _Solver:
    """The state of one solve: the options of each type, and a count of probes."""

    def __init__(self, problem: UnevenProblem) -> None:
        self._problem = problem
        types = list(dict.fromkeys(problem.gpus))
        self._types = [types.index(gpu) for gpu in problem.gpus]
        self._gpus = types
        self._options = [_options(problem, gpu) for gpu in types]
        self.probes = 0

    def members(self, time: float) -> list[StepFunction]:
        idle = [gpu.idle_memory if self._problem.allow_idle else None for gpu in self._gpus]
        steps = [
            options.steps(time, self._problem.batch, least)
            for options, least in zip(self._options, idle, strict=True)
        ]
        return [steps[kind] for kind in self._types]

    def times(self) -> Floats:
        """Every time that a GPU may take, ascending."""
        every = [options.times for options in self._options]
        if self._problem.allow_idle:
            every.append(np.array([layer_time(self._problem, self._gpus[0], 0, 0)]))
        return np.unique(np.concatenate(every))

    def covers(self, time: float) -> bool:
        """Whether the batch can be computed in that time, whatever the memory of all together."""
        members = self.members(time)
        if not all(len(steps.amounts) for steps in members):
            return False
        return sum(int(steps.amounts[-1]) for steps in members) >= self._problem.batch

    def fits(self, time: float) -> bool:
        """Whether it can with the memory that there is."""
        self.probes += 1
        return least_cost(self.members(time), self._problem.batch) < self._problem.budget

    def choose(self, time: float) -> tuple[list[int], list[int]]:
        """Micro-batch sizes, and the most samples that each GPU computes in that time."""
        members = self.members(time)
        sizes = cheapest(members, self._problem.batch)
        most: list[int] = []
        for steps, size in zip(members, sizes, strict=True):
            most.append(int(steps.amounts[steps.labels == size][0]))
        return sizes, most


def solve(problem: UnevenProblem) -> Assignment | Infeasible:
    """The least time in which the batch can be computed, with the least memory at that time."""
    refused = _refused(problem)
    if refused is not None:
        return refused
    solver = _Solver(problem)
    times = solver.times()
    if not solver.fits(float(times[-1])):
        return _too_little_memory(problem, solver)
    # The least time that covers the batch is mostly within the budget; if not, one soon after is.
    low = high = _first(times, 0, len(times) - 1, solver.covers)
    step = 1
    while not solver.fits(float(times[high])):
        low, high, step = high + 1, min(high + step, len(times) - 1), 2 * step
    best = _first(times, low, high, solver.fits)
    sizes, most = solver.choose(float(times[best]))
    batches = _deal(problem, sizes, most)
    dealt = zip(problem.gpus, sizes, batches, strict=True)
    sizes = [_not_above(gpu, size, batch) for gpu, size, batch in dealt]
    taken = [
        layer_time(problem, gpu, size, -(-batch // size) if size else 0)
        for gpu, size, batch in zip(problem.gpus, sizes, batches, strict=True)
    ]
    memory = sum(_memory(gpu, size) for gpu, size in zip(problem.gpus, sizes, strict=True))
    return Assignment(max(taken), tuple(batches), tuple(sizes), memory, solver.probes)


def state_shares(problem: UnevenProblem, found: Assignment) -> list[float]:
    """Each GPU's share of the state: even, except where room is short. They sum to 1."""
    rooms = [
        max(0.0, (problem.usable * gpu.capacity - _memory(gpu, size)) / problem.state)
        for gpu, size in zip(problem.gpus, found.microbatch_sizes, strict=True)
    ]
    return water_fill(rooms, 1.0)


def _memory(gpu: UnevenGpu, microbatch: int) -> float:
    return gpu.memory.at(microbatch) if microbatch else gpu.idle_memory


def _first(times: Floats, low: int, high: int, able: Callable[[float], bool]) -> int:
    """The first position in low..high at which it is able; it is at ``high``."""
    while low < high:
        middle = (low + high) // 2
        if able(float(times[middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _deal(problem: UnevenProblem, sizes: Sequence[int], most: Sequence[int]) -> list[int]:
    """Batches that sum to the batch: what is too much is taken from who is then the slowest."""
    batches = list(most)
    least = 0 if problem.allow_idle else 1
    # Time a sample, as if a micro-batch that is not full took its part of the time.
    pace = [
        layer_time(problem, gpu, size, 1) / size if size else 0.0
        for gpu, size in zip(problem.gpus, sizes, strict=True)
    ]
    for _ in range(sum(batches) - problem.batch):
        able = [index for index, batch in enumerate(batches) if batch > least]
        slowest = max(able, key=lambda index: batches[index] * pace[index])
        batches[slowest] -= 1
    return batches


def _not_above(gpu: UnevenGpu, size: int, batch: int) -> int:
    """A micro-batch that no batch fills is cut to the batch, unless a profile says that is worse.

    Curves that were measured need not rise everywhere.
    """
    if size <= batch or batch == 0:
        return min(size, batch)
    curves = (gpu.forward, gpu.backward, gpu.memory)
    return batch if all(curve.at(batch) <= curve.at(size) for curve in curves) else size


def _refused(problem: UnevenProblem) -> Infeasible | None:
    """What no amount of time would mend, except the memory of all together."""
    gpus = problem.gpus
    if not problem.allow_idle and problem.batch < len(gpus):
        return Infeasible(
            f"a batch of {problem.batch} is less than {len(gpus)} GPUs, each of which must compute "
            "a sample: raise the batch, or let GPUs be idle"
        )
    for index, gpu in enumerate(gpus):
        limit = problem.usable * gpu.capacity
        least = float(gpu.memory.upto(problem.batch).min())
        least = gpu.idle_memory if problem.allow_idle else least
        if least > limit:
            what = "collectives alone" if problem.allow_idle else "the smallest micro-batch"
            return Infeasible(
                f"GPU {index} ({gpu.name}) needs {least:.2f} GiB for {what} and may use "
                f"{limit:.2f}: {least - limit:.2f} GiB are missing there",
                least - limit,
                index,
            )
    return None


def _too_little_memory(problem: UnevenProblem, solver: _Solver) -> Infeasible:
    least = least_cost(solver.members(math.inf), problem.batch)
    if math.isinf(least):
        return Infeasible("no GPU has the memory for a micro-batch of one sample")
    missing = least - problem.budget
    limit = problem.usable * sum(gpu.capacity for gpu in problem.gpus)
    return Infeasible(
        f"all GPUs together need {problem.state:.2f} GiB for state and at least {least:.2f} GiB to "
        f"compute, and may use {limit:.2f}: {missing:.2f} GiB are missing",
        missing,
    )
