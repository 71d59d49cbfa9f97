"""All loads of a rank, each made only when it is asked for.

A batch of 65,536 has 10^5 of them and more, but in a given time a rank computes about as much as it
can, because all others do: of each micro-batch's loads the last few. More samples never take less
(the profiles' tables rise), so where a load no longer fits is found by bisection.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, Load, load
from hytrain.tools.planner.load_table import Growth, LoadTable
from hytrain.tools.planner.min_plus import Floats
from hytrain.tools.planner.passes import layer_passes, outside_seconds
from hytrain.tools.planner.problem import PlanProblem

# All batches up to here are loads of their own; of larger ones only multiples of a micro-batch.
_MOST_BATCHES = 64


@dataclass(frozen=True, slots=True)
class Batches:
    """(fewest, most) samples of each load with micro-batches of a size, ascending.

    Up to that size they are one micro-batch, which may have any size above ``below``.

    Attributes:
        batch: samples of the global batch.
        size: of a micro-batch.
        below: the next smaller size that may be chosen.
    """

    batch: int
    size: int
    below: int

    @property
    def num_single(self) -> int:
        """Loads of one micro-batch."""
        return min(self.size, self.batch) - self.below

    @property
    def indices(self) -> range:
        """Of all loads."""
        further = max(0, self.batch - self.size)
        if self.batch > _MOST_BATCHES:
            further = max(0, -(-self.batch // self.size) - 1)
        return range(self.num_single + further)

    def in_rounds(self, rounds: int) -> range:
        """Of the loads with so many micro-batches."""
        single, number = self.num_single, rounds - 2
        if rounds == 1:
            return self.indices[:single]
        if self.batch <= _MOST_BATCHES:
            return self.indices[single + number * self.size : single + (number + 1) * self.size]
        return self.indices[single + number : single + number + 1]

    def at(self, index: int) -> tuple[int, int]:
        """The fewest and the most samples of a load."""
        more = index - self.num_single
        if more < 0:
            return self.below + 1 + index, self.below + 1 + index
        if self.batch <= _MOST_BATCHES:
            return self.size + 1 + more, self.size + 1 + more
        before = (more + 1) * self.size
        return before + 1, min(before + self.size, self.batch)


@dataclass(slots=True)
class _Shelf:
    """Loads of one policy and size of micro-batches."""

    make: Callable[[int, int, Activations], Load]
    policy: Activations
    batches: Batches
    indices: range
    _full: dict[int, Load] = field(default_factory=dict[int, Load])
    _few: dict[int, Load] = field(default_factory=dict[int, Load])

    def full(self, index: int) -> Load:
        """A load as it would be carried out."""
        if index not in self._full:
            least, most = self.batches.at(index)
            size = self.batches.size
            single = least == most
            self._full[index] = self.few(index) if single else self.make(most, size, self.policy)
        return self._full[index]

    def few(self, index: int) -> Load:
        """With the fewest samples."""
        if index not in self._few:
            least, _ = self.batches.at(index)
            self._few[index] = self.make(least, min(self.batches.size, least), self.policy)
        return self._few[index]

    def fitting(self, fits: Callable[[Load], bool], *, outer: bool) -> range:
        """Indices of the loads before the first one that does not fit."""
        made = self.few if outer else self.full
        number = bisect.bisect_left(self.indices, True, key=lambda index: not fits(made(index)))
        return self.indices[:number]


class CandidateLoads:
    """All loads of a rank, but those that leave no room on the GPU or take too long."""

    def __init__(
        self,
        problem: PlanProblem,
        host: Host,
        gpu: GpuProfile,
        collectives: Collectives,
        worst: float,
    ) -> None:
        """
        Args:
            problem: what is planned.
            host: the rank's.
            gpu: the rank's.
            collectives: of one layer.
            worst: seconds; loads that take longer are left out.
        """
        self.host = host
        self.gpu = gpu
        self.num_made = 0
        """Loads that were made so far."""

        def make(batch: int, size: int, policy: Activations) -> Load:
            self.num_made += 1
            return load(problem, gpu, collectives, batch, size, policy)

        def fits(work: Load) -> bool:
            return work.room >= 0.0 and work.compute <= worst

        self._idle: list[Load] = []
        if problem.allow_idle:
            idle = make(0, 0, problem.activations[0])
            self._idle = [idle] if idle.room >= 0.0 else []
        self._shelves: list[_Shelf] = []
        for policy in problem.activations:
            for below, size in itertools.pairwise((0, *gpu.micro_batches(problem.batch))):
                batches = Batches(problem.batch, size, below)
                indices = batches.indices
                if problem.rounds is not None:
                    indices = batches.in_rounds(problem.rounds)
                shelf = _Shelf(make, policy, batches, indices)
                shelf.indices = shelf.fitting(fits, outer=True)
                if shelf.indices:
                    self._shelves.append(shelf)
        self._growth: dict[Activations, Growth] = {
            policy: Growth(_growth(problem, gpu, collectives, policy))
            for policy in problem.activations
            if any(shelf.policy == policy for shelf in self._shelves)
        }
        self._host_bytes = host.memory_bytes
        self._made: list[range] = [range(0)] * len(self._shelves)
        self._menu = self._menu_of(self._made)
        self._ends = self._menu_of([shelf.indices[-1:] for shelf in self._shelves])

    @property
    def extremes(self) -> list[Load]:
        """Those with the fewest and the most samples of each policy and micro-batch."""
        first = [shelf.full(shelf.indices[0]) for shelf in self._shelves]
        return [*first, *self._ends.loads]

    @property
    def longest(self) -> LoadTable:
        """Those with the most samples of each policy and micro-batch."""
        return self._ends

    def most_samples(self, step: float, *, outer: bool) -> int:
        """The most that a load computes in a step of so many seconds; -1 where there is none."""
        most = 0 if self._idle and self._idle[0].compute <= step else -1
        for shelf, indices in zip(self._shelves, self._in_time(step, outer=outer), strict=True):
            if indices:
                most = max(most, self._samples(shelf, indices[-1], step, outer=outer))
        return most

    def _samples(self, shelf: _Shelf, index: int, step: float, *, outer: bool) -> int:
        """What :meth:`LoadTable.samples` has for one load."""
        _, most = shelf.batches.at(index)
        if not outer or index < shelf.batches.num_single:
            return most
        few = shelf.few(index)
        return min(most, few.batch + self._growth[shelf.policy].more(step - few.compute))

    def menu(self, step: float, least: int, *, outer: bool) -> LoadTable:
        """Loads of a step of so many seconds with at least so many samples, and maybe others."""
        wanted: list[range] = []
        for shelf, indices in zip(self._shelves, self._in_time(step, outer=outer), strict=True):
            # By the outer reading a load may have any number up to its most.
            first = bisect.bisect_left(indices, least, key=lambda at, s=shelf: s.batches.at(at)[1])
            wanted.append(indices[first:])
        if not all(_has(made, want) for made, want in zip(self._made, wanted, strict=True)):
            self._made = [_both(*pair) for pair in zip(self._made, wanted, strict=True)]
            self._menu = self._menu_of(self._made)
        return self._menu

    def _in_time(self, step: float, *, outer: bool) -> list[range]:
        """Of each shelf, the loads that are computed and copied in time, and fit the host."""
        offloaded = min(step * self.gpu.copy_rate, step * self.host.bandwidth / 2.0)
        offloaded = min(offloaded, self._host_bytes)

        def fits(work: Load) -> bool:
            return work.compute <= step and work.offloaded <= offloaded * (1.0 + 1e-9)

        return [shelf.fitting(fits, outer=outer) for shelf in self._shelves]

    def _menu_of(self, chosen: Sequence[range]) -> LoadTable:
        inner, outer = [*self._idle], [*self._idle]
        for shelf, indices in zip(self._shelves, chosen, strict=True):
            for index in indices:
                inner.append(shelf.full(index))
                outer.append(shelf.few(index))
        return LoadTable.of(inner, outer, self._growth)


def _has(made: range, wanted: range) -> bool:
    return not wanted or (bool(made) and made[0] <= wanted[0] and wanted[-1] <= made[-1])


def _both(one: range, other: range) -> range:
    """From the lesser begin to the greater end."""
    if not one or not other:
        return one or other
    return range(min(one[0], other[0]), max(one[-1], other[-1]) + 1)


def _growth(
    problem: PlanProblem, gpu: GpuProfile, collectives: Collectives, policy: Activations
) -> Floats:
    """See :class:`Growth`. Layer-major, waits hide some of it, the less the more micro-batches."""
    largest = gpu.micro_batches(problem.batch)[-1]
    seconds: list[float] = []
    for size in range(1, largest + 1):
        sizes = [(1, largest), (1, size)]
        passes = layer_passes(problem, gpu, collectives, sizes, 0.0, policy)
        seconds.append(problem.model.num_layers * passes.total + outside_seconds(gpu, sizes))
    # Where a larger one is faster, a smaller one may as well take its time.
    return np.minimum.accumulate((np.array(seconds) - seconds[0])[::-1])[::-1].copy()
