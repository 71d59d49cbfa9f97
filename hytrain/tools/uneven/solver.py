"""Solves Cephalo's problem (:mod:`.problem`) exactly.

The published solver (a dynamic program over GPUs, batch and the sum of micro-batch sizes,
O(N B^3)) has faults that are not repeated here:

- If nothing fits, it still returns a plan, the first that it meets, without a warning. Here the
  result is an :class:`Infeasible`, which says what is missing.
- It considers only batches that are multiples of the micro-batch, and takes the sum of micro-batch
  sizes for the memory, which is right only if every GPU's C is the same straight line.

This solver tries times: a GPU can take only finitely many. Within a time, a GPU with micro-batches
of m covers some number of samples at the cost C(m); the least memory at which all together cover
the batch is a (min,+) sum over the GPUs. The least time at which that is within the budget is the
optimum.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.allocation import water_fill
from hytrain.tools.planner.problem import Floats, Ints
from hytrain.tools.uneven.problem import UnevenGpu, UnevenProblem, layer_time


@dataclass(frozen=True, slots=True)
class Assignment:
    """An optimum: of all plans with the least time, one with the least memory.

    Attributes:
        time: one layer's forward and backward on the slowest GPU, ms.
        batch_sizes: samples of each GPU.
        memory: C of all GPUs together, GiB.
    """

    time: float
    batch_sizes: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    memory: float

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Number of micro-batches of each GPU."""
        pairs = zip(self.batch_sizes, self.microbatch_sizes, strict=True)
        return tuple(-(-batch // size) for batch, size in pairs)


@dataclass(frozen=True, slots=True)
class _Options:
    """What a GPU can do, by ascending memory; with equal memory the most samples first.

    Attributes:
        sizes: sizes of micro-batches.
        samples: samples that the option's micro-batches cover.
        memory: C of each size.
        times: one layer's time, ms.
    """

    sizes: Ints
    samples: Ints
    memory: Floats
    times: Floats

    @staticmethod
    def of(problem: UnevenProblem, gpu: UnevenGpu) -> _Options:
        """Returns each micro-batch size that fits, with 1, 2, ... of them up to the whole batch."""
        memory = np.array(gpu.memory[: problem.batch])
        fitting = 1 + np.flatnonzero(memory <= problem.usable * gpu.capacity)
        most = -(-problem.batch // fitting)
        sizes = np.repeat(fitting, most)
        numbers = np.concatenate([np.arange(1, count + 1) for count in most])
        samples = np.minimum(sizes * numbers, problem.batch)
        order = np.lexsort((-samples, memory[sizes - 1]))
        times = layer_time(problem, gpu, sizes, numbers)
        return _Options(sizes[order], samples[order], memory[sizes - 1][order], times[order])

    def within(self, time: float) -> _Options:
        """Returns the best within a time: each has more memory and samples than the last."""
        able = np.flatnonzero(self.times <= time)
        is_more = np.diff(np.maximum.accumulate(self.samples[able]), prepend=0) > 0
        kept = able[is_more]
        return _Options(self.sizes[kept], self.samples[kept], self.memory[kept], self.times[kept])


def _least_memory(members: Sequence[_Options], batch: int) -> tuple[float, list[int]]:
    """Returns the least memory with which all cover the batch together, and each one's option.

    Infinite, and no options, if they cannot.
    """
    least = np.full(batch + 1, np.inf)  # for each number of samples, with the GPUs so far
    least[0] = 0.0
    most = [one.samples[-1] if len(one.samples) else -math.inf for one in members]
    if sum(most) < batch:
        return math.inf, []
    used: list[Ints] = []
    for one in members:
        # [o, b]: option o's memory plus the least for what it leaves of b to the GPUs before.
        widest = int(one.samples[-1])
        padded = np.concatenate([np.full(widest, least[0]), least])
        windows = np.lib.stride_tricks.sliding_window_view(padded, batch + 1)
        candidates = windows[widest - one.samples] + one.memory[:, None]
        used.append(candidates.argmin(axis=0))
        least = candidates.min(axis=0)
    options: list[int] = []
    left = batch
    for one, choice in zip(reversed(members), reversed(used), strict=True):
        options.append(int(choice[left]))
        left = max(0, left - int(one.samples[options[-1]]))
    return float(least[batch]), options[::-1]


def solve(problem: UnevenProblem) -> Assignment | Infeasible:
    """Returns the plan of least time for the batch, with the least memory at that time."""
    refused = _refused(problem)
    if refused is not None:
        return refused
    types = list(dict.fromkeys(problem.gpus))
    options = [_Options.of(problem, gpu) for gpu in types]
    times = np.unique(np.concatenate([one.times for one in options]))
    kinds = [types.index(gpu) for gpu in problem.gpus]

    def members(time: float) -> list[_Options]:
        able = [one.within(time) for one in options]
        return [able[kind] for kind in kinds]

    def fits(time: float) -> bool:
        return _least_memory(members(time), problem.batch)[0] < problem.budget

    if not fits(times[-1]):
        return _too_little_memory(problem, _least_memory(members(times[-1]), problem.batch)[0])
    within = members(times[bisect_left(times, True, key=fits)])
    _, chosen = _least_memory(within, problem.batch)
    sizes = [int(one.sizes[at]) for one, at in zip(within, chosen, strict=True)]
    most = [int(one.samples[at]) for one, at in zip(within, chosen, strict=True)]
    batches = _deal(problem, sizes, most)
    dealt = list(zip(problem.gpus, sizes, batches, strict=True))
    sizes = [_not_above(gpu, size, batch) for gpu, size, batch in dealt]
    dealt = list(zip(problem.gpus, sizes, batches, strict=True))
    return Assignment(
        max(float(layer_time(problem, gpu, size, -(-batch // size))) for gpu, size, batch in dealt),
        tuple(batches),
        tuple(sizes),
        sum(gpu.memory[size - 1] for gpu, size, _ in dealt),
    )


def state_shares(problem: UnevenProblem, found: Assignment) -> list[float]:
    """Returns each GPU's share of the state: even, unless room is short. They sum to 1."""
    rooms = [
        max(0.0, (problem.usable * gpu.capacity - gpu.memory[size - 1]) / problem.state)
        for gpu, size in zip(problem.gpus, found.microbatch_sizes, strict=True)
    ]
    return water_fill(rooms, 1.0)


def _deal(problem: UnevenProblem, sizes: Sequence[int], most: Sequence[int]) -> list[int]:
    """Returns batches that sum to the batch: each sample too many is taken from the slowest GPU."""
    batches = list(most)
    # Time per sample, as if a micro-batch that is not full took its part of the time.
    pace = [
        float(layer_time(problem, gpu, size, 1)) / size
        for gpu, size in zip(problem.gpus, sizes, strict=True)
    ]
    for _ in range(sum(batches) - problem.batch):
        able = [index for index, batch in enumerate(batches) if batch > 1]
        slowest = max(able, key=lambda index: batches[index] * pace[index])
        batches[slowest] -= 1
    return batches


def _not_above(gpu: UnevenGpu, size: int, batch: int) -> int:
    """Returns the micro-batch, cut to the batch if larger, unless a profile says that is worse.

    Measured curves need not rise everywhere.
    """
    curves = (gpu.forward, gpu.backward, gpu.memory)
    return min(size, batch) if all(one[batch - 1] <= one[size - 1] for one in curves) else size


def _refused(problem: UnevenProblem) -> Infeasible | None:
    """Returns why no time is long enough, apart from the memory of all GPUs together."""
    if problem.batch < len(problem.gpus):
        return Infeasible(
            f"a batch of {problem.batch} is too small for {len(problem.gpus)} GPUs: each "
            "must compute at least one sample"
        )
    for index, gpu in enumerate(problem.gpus):
        limit = problem.usable * gpu.capacity
        least = min(gpu.memory[: problem.batch])
        if least > limit:
            return Infeasible(
                f"GPU {index} ({gpu.name}) needs {least:.2f} GiB for the smallest micro-batch but "
                f"may use only {limit:.2f}: {least - limit:.2f} GiB are missing",
                least - limit,
            )
    return None


def _too_little_memory(problem: UnevenProblem, least: float) -> Infeasible:
    missing = least - problem.budget
    limit = problem.usable * sum(gpu.capacity for gpu in problem.gpus)
    return Infeasible(
        f"all GPUs together need {problem.state:.2f} GiB for state and at least {least:.2f} GiB to "
        f"compute, but may use only {limit:.2f}: {missing:.2f} GiB are missing",
        missing,
    )
