"""What a rank may do in a step: its loads, as the mixed-integer program takes them.

A batch of 65,536 has 10^5 loads a rank and more. Few are made. For one policy and one size of
micro-batches all numbers of a load (seconds, memory, bytes to the host) are convex functions of the
number of micro-batches, of few straight parts: a *chain* is the loads at their corners, and what
lies between two of them is a weighted mean of both. A last micro-batch that is not full takes no
less than its part of a full one where times do not grow faster than samples; by how much it might,
in a table of odd times, the chain is too optimistic: its loads are made better by so much, so that
no load of the rank is left out (:class:`Chain`). Where a rank's samples are known to lie in a small
range, every load is a chain of its own, and nothing is left to a mean.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import Load, sizes_to_choose
from hytrain.tools.planner.load_maker import LoadMaker
from hytrain.tools.planner.min_plus import Floats
from hytrain.tools.planner.problem import PlanProblem

# Ranges of so many samples are listed load by load.
_MOST_LISTED = 96
# Parts of a chain that differ by no more than this share of its end are one.
_STRAIGHT = 1e-6
_REFERENCES = 8
# Behind so few full micro-batches every one that is not full is looked at; then at this ratio.
_FEW = 24
_SPREAD = 1.3


@dataclass(frozen=True, slots=True)
class Chain:
    """Loads of one policy and micro-batch size; a rank takes one of them, or a mean of several.

    Attributes:
        microbatch: its size; 0 for no samples.
        loads: by samples, ascending; never worse than the loads that they stand for.
    """

    microbatch: int
    loads: tuple[Load, ...]


@dataclass(slots=True)
class _Family:
    """All loads of a policy and micro-batch size.

    Attributes:
        samples: that they may have: all from the first to the last.
        whole: parameters of the model.
    """

    make: Callable[[int, int, Activations], Load]
    policy: Activations
    size: int
    samples: range
    whole: int
    _made: dict[int, Load] = field(default_factory=dict[int, Load])
    _corners: list[int] | None = None
    _better: Floats | None = None

    def at(self, samples: int) -> Load:
        """The load."""
        if samples not in self._made:
            self._made[samples] = self.make(samples, min(self.size, samples), self.policy)
        return self._made[samples]

    def fitting(self, fits: Callable[[Load], bool]) -> range:
        """Samples of the loads before the first one that does not fit."""
        number = bisect.bisect_left(self.samples, True, key=lambda one: not fits(self.at(one)))
        return self.samples[:number]

    def chains(self, last: int) -> Iterator[Chain]:
        """The loads of up to ``last`` samples: of one micro-batch, and of several.

        Where the second one begins, memory may be taken at once.
        """
        if self._corners is None or self._better is None:
            self._corners, self._better = self._found_corners(), self._found_better()
        ends = (last // self.size * self.size, last)
        samples = sorted({*(one for one in self._corners if one <= last), *ends})
        for part in (range(self.samples[0], self.size + 1), range(self.size + 1, last + 1)):
            loads = [self.at(one) for one in samples if one in part]
            if loads:
                yield Chain(self.size, tuple(_improved(one, self._better) for one in loads))

    def _found_corners(self) -> list[int]:
        first, last = self.samples[0], self.samples[-1]
        size = self.size
        corners = {first, last, *(one for one in (size, size + 1) if first <= one <= last)}
        full = max(2, -(-first // size)), last // size
        if full[0] <= full[1]:
            corners |= {size * number for number in self._bent(*full)}
        return sorted(corners)

    def _bent(self, first: int, last: int) -> set[int]:
        """Numbers of full micro-batches between which the loads are on straight lines."""
        if last - first <= 1:
            return {first, last}
        low, high = self._numbers(first), self._numbers(last)
        begin = self._numbers(first + 1) - low
        end = high - self._numbers(last - 1)
        width = last - first
        bend = end - begin
        with np.errstate(divide="ignore", invalid="ignore"):
            meet = np.where(bend > 0.0, (low - high + end * width) / bend, 0.0)
        below = (high - low) / width * meet - begin * meet
        bent = below > _STRAIGHT * np.maximum(np.abs(high), np.abs(low))
        if not bent.any():
            return {first, last}
        middle = first + int(np.clip(meet[int(np.where(bent, below, 0.0).argmax())], 1, width - 1))
        after = min(middle + 1, last)
        return self._bent(first, middle) | self._bent(after, last)

    def _numbers(self, number: int) -> Floats:
        return _numbers(self.at(number * self.size), self.whole)

    def _found_better(self) -> Floats:
        """By how much a load may be better than the mean of two with fuller micro-batches.

        Also what :meth:`_bent` took for straight.
        """
        last = self.samples[-1]
        most = _STRAIGHT * np.abs(_numbers(self.at(last), self.whole))
        bases = self._looked_at(last // self.size)
        ranges = [range(base * self.size, min((base + 1) * self.size, last) + 1) for base in bases]
        ranges.append(range(self.samples[0], min(self.size, last) + 1))
        ranges.append(range(self.size + 1, min(2 * self.size, last) + 1))
        for samples in ranges:
            if len(samples) < 3 or samples[0] < self.samples[0]:
                continue
            values = np.array([_numbers(self.at(one), self.whole) for one in samples])
            for end in range(2, len(samples)):
                part = np.arange(1, end)[:, None] / end
                mean = values[0] + (values[end] - values[0]) * part
                most = np.maximum(most, (mean - values[1:end]).max(axis=0))
        return most

    def _looked_at(self, full: int) -> set[int]:
        """Numbers of full micro-batches behind which one that is not full is looked at.

        All of the first ones, those beside a bend of the full ones, and some of the others: between
        bends what a micro-batch adds changes with what binds it, which also bends.
        """
        bends = {one // self.size for one in self._corners or []}
        beside = {bend + by for bend in bends for by in (-1, 0, 1)}
        spread = {round(_FEW * _SPREAD**power) for power in range(1, 32)}
        wanted = set(range(1, _FEW + 1)) | beside | spread | {full - 1, full}
        return {number for number in wanted if 1 <= number <= full}


def _numbers(work: Load, whole: int) -> Floats:
    """What is the better the less: seconds, taken memory; with fetches of some sizes of shard."""
    numbers = [work.compute, work.edge, -work.room, -work.end_room]
    if work.fetches:
        shards = (whole * part / _REFERENCES for part in range(1, _REFERENCES + 1))
        numbers += [work.compute + work.fetching(shard) for shard in shards]
    return np.array(numbers)


def _improved(work: Load, better: Floats) -> Load:
    most = max(float(better[0]), *better[4:].tolist()) if len(better) > 4 else float(better[0])
    return replace(
        work,
        compute=work.compute - most,
        edge=work.edge - float(better[1]),
        room=work.room + float(better[2]),
        end_room=work.end_room + float(better[3]),
    )


class RankLoads:
    """All loads of a rank, but those that leave no room on the GPU or take too long."""

    def __init__(
        self,
        problem: PlanProblem,
        host: Host,
        gpu: GpuProfile,
        maker: LoadMaker,
        worst: float,
    ) -> None:
        """
        Args:
            problem: what is planned.
            host: the rank's.
            gpu: the rank's.
            maker: makes loads of the problem.
            worst: seconds; loads that take longer are left out.
        """
        self.host = host
        self.gpu = gpu
        rounds = problem.rounds

        def make(batch: int, size: int, policy: Activations) -> Load:
            return maker.of(gpu, batch, size, policy)

        def fits(work: Load) -> bool:
            return work.room >= 0.0 and work.compute <= worst

        self._idle: list[Load] = []
        if problem.allow_idle:
            idle = make(0, 0, problem.activations[0])
            self._idle = [idle] if idle.room >= 0.0 else []
        self._families: list[_Family] = []
        for policy in problem.activations:
            for below, size in itertools.pairwise(
                (0, *sizes_to_choose(problem, gpu, problem.batch))
            ):
                samples = range(below + 1, problem.batch + 1)
                if rounds is not None:
                    fewest = max(below, (rounds - 1) * size) + 1
                    samples = range(fewest, min(problem.batch, rounds * size) + 1)
                if not samples:
                    continue
                family = _Family(make, policy, size, samples, problem.model.parameters)
                family.samples = family.fitting(fits)
                if family.samples:
                    self._families.append(family)
        self._host_bytes = host.memory_bytes

    @property
    def extremes(self) -> list[Load]:
        """Those with the fewest and the most samples of each policy and micro-batch."""
        families = self._families
        ends = [family.at(family.samples[end]) for family in families for end in (0, -1)]
        return [*ends, *self._idle]

    def most_samples(self, step: float) -> int:
        """The most that a load computes in a step of so many seconds; -1 where there is none."""
        idle = any(one.compute <= step for one in self._idle)
        return max((ranged[-1] for _, ranged in self._in_time(step)), default=0 if idle else -1)

    def chains(self, step: float, least: int) -> list[Chain]:
        """What a rank may do in a step of so many seconds, with so many samples at least."""
        idle = [one for one in self._idle if one.compute <= step and least <= 0]
        chains = [Chain(0, (one,)) for one in idle]
        families = [(one, ranged) for one, ranged in self._in_time(step) if ranged[-1] >= least]
        most = max((ranged[-1] for _, ranged in families), default=0)
        if most - max(0, least) <= _MOST_LISTED:
            return chains + list(_listed(families, least))
        for family, ranged in families:
            chains += family.chains(ranged[-1])
        return chains

    def _in_time(self, step: float) -> Iterator[tuple[_Family, range]]:
        """Of each family the loads that are computed and copied in time, and fit the host."""
        offloaded = min(step * self.gpu.copy_rate, step * self.host.bandwidth / 2.0)
        offloaded = min(offloaded, self._host_bytes) * (1.0 + 1e-9)

        def fits(work: Load) -> bool:
            return work.compute <= step and work.offloaded <= offloaded

        for family in self._families:
            ranged = family.fitting(fits)
            if ranged:
                yield family, ranged


def _listed(families: Sequence[tuple[_Family, range]], least: int) -> Iterator[Chain]:
    """Every load that no other one of its policy and samples beats."""
    by_kind: dict[tuple[Activations, int], list[tuple[_Family, Load]]] = {}
    for family, ranged in families:
        for samples in range(max(least, ranged[0]), ranged[-1] + 1):
            key = family.policy, samples
            by_kind.setdefault(key, []).append((family, family.at(samples)))
    for members in by_kind.values():
        numbers = np.array([_numbers(work, family.whole) for family, work in members])
        for row, (family, work) in enumerate(members):
            as_good = (numbers <= numbers[row]).all(axis=1)
            strictly = (numbers < numbers[row]).any(axis=1)
            earlier = np.arange(len(members)) < row
            if not (as_good & (strictly | earlier)).any():
                yield Chain(family.size, (work,))
