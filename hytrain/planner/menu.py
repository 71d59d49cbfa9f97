"""All loads that a rank can choose from, as columns of numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hytrain.planner.cluster import GpuProfile, Host
from hytrain.planner.cover import Floats, Ints
from hytrain.planner.loads import Collectives, Columns, Load, fits_rounds, load
from hytrain.planner.passes import layer_passes, outside_seconds
from hytrain.planner.policies import Activations
from hytrain.planner.problem import PlanProblem

# All batches up to here are loads of their own; of larger ones only multiples of a micro-batch.
_MOST_BATCHES = 64
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Menu:
    """All loads of a rank.

    Attributes:
        host: the rank's.
        gpu: the rank's.
        loads: as they would be carried out.
        amounts: samples that each computes.
        fewest: as few as the same micro-batches allow.
        single: which loads are one micro-batch.
        inner: their numbers.
        outer: their numbers with the fewest samples.
        growth: for each policy, which loads have it, and seconds by which compute grows, with all
            else equal, as the last micro-batch grows from 1 sample to 2, 3, ...
    """

    host: Host
    gpu: GpuProfile
    loads: tuple[Load, ...]
    amounts: Ints
    fewest: Ints
    single: npt.NDArray[np.bool_]
    inner: Columns
    outer: Columns
    growth: tuple[tuple[npt.NDArray[np.bool_], Floats], ...]

    @staticmethod
    def of(
        problem: PlanProblem, host: Host, gpu: GpuProfile, collectives: Collectives, worst: float
    ) -> Menu:
        """Loads that leave no room on the GPU, or take longer than ``worst``, are left out."""
        inner: list[Load] = []
        outer: list[Load] = []
        if problem.allow_idle:
            idle = load(problem, gpu, collectives, 0, 0, problem.activations[0])
            if idle.room >= 0.0:
                inner, outer = [idle], [idle]
        for policy in problem.activations:
            for below, size in itertools.pairwise((0, *gpu.micro_batches(problem.batch))):
                for least, batch in _batches(problem.batch, size, below):
                    if not fits_rounds(problem, batch, size):
                        continue
                    few = load(problem, gpu, collectives, least, min(size, least), policy)
                    if few.room < 0.0 or few.compute > worst:
                        break
                    full = few
                    if least != batch:
                        full = load(problem, gpu, collectives, batch, size, policy)
                    inner.append(full)
                    outer.append(few)
        amounts = np.array([work.batch for work in inner], dtype=np.intp)
        fewest = np.array([work.batch for work in outer], dtype=np.intp)
        single = np.array([work.microbatch == work.batch for work in outer], dtype=np.bool_)
        policies = np.array([work.activations for work in inner])
        growth = tuple(
            (policies == policy, _growth(problem, gpu, collectives, policy))
            for policy in problem.activations
        )
        columns = Columns.of(inner), Columns.of(outer)
        return Menu(host, gpu, tuple(inner), amounts, fewest, single, *columns, growth)

    def samples(self, step: float, *, outer: bool) -> Ints:
        """What each load computes in a step of so many seconds; by the outer reading at least."""
        if not outer:
            return self.amounts
        most = self.fewest.copy()
        slack = step - self.outer.compute
        for has_policy, seconds in self.growth:
            more = np.searchsorted(seconds, slack[has_policy] * (1.0 + _ROUNDING), side="right")
            most[has_policy] += np.maximum(0, more - 1)
        # A single one's growth may hide behind what its forward waits for.
        return np.where(self.single, self.amounts, np.minimum(most, self.amounts))


def _growth(
    problem: PlanProblem, gpu: GpuProfile, collectives: Collectives, policy: Activations
) -> Floats:
    """See :class:`Menu`. Layer-major, waits hide some of it, the less the more micro-batches."""
    largest = gpu.micro_batches(problem.batch)[-1]
    seconds: list[float] = []
    for size in range(1, largest + 1):
        sizes = [(1, largest), (1, size)]
        passes = layer_passes(problem, gpu, collectives, sizes, 0.0, policy)
        seconds.append(problem.model.num_layers * passes.total + outside_seconds(gpu, sizes))
    # Where a larger one is faster, a smaller one may as well take its time.
    return np.minimum.accumulate((np.array(seconds) - seconds[0])[::-1])[::-1].copy()


def _batches(most: int, size: int, below: int) -> list[tuple[int, int]]:
    """(fewest, most) samples of each load with micro-batches of a size.

    Up to that size they are one micro-batch, which may have any size above ``below``, the next
    smaller one that may be chosen.
    """
    single = [(batch, batch) for batch in range(below + 1, min(size, most) + 1)]
    if most <= _MOST_BATCHES:
        return single + [(batch, batch) for batch in range(size + 1, most + 1)]
    ends = [min(number * size, most) for number in range(1, -(-most // size) + 1)]
    return single + [(before + 1, end) for before, end in itertools.pairwise(ends)]
