"""What a rank may do in a step of a given length.

A batch of 65,536 has 10^5 workloads per rank and more. Few are made: if a rank may have many
numbers of samples, they are cut into ranges, and a range makes one offer: its most samples, with
the workload of its fewest. So an offer is never worse than what it stands for, and if a rank's
samples are known to lie in a small range, each number is an offer of its own.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, Workload, sizes_to_choose, workload
from hytrain.tools.planner.problem import PlanProblem

# The most numbers of samples, or ranges of them, that are looked at.
_MOST_RANGES = 64


@dataclass(frozen=True, slots=True)
class Offer:
    """A range of workloads of a rank.

    Attributes:
        samples: the most samples of the range.
        size: the largest size of their micro-batches; 0 for no samples.
        work: the workload of the fewest samples for a bound, else of ``samples``.
    """

    samples: int
    size: int
    work: Workload


@dataclass(slots=True)
class _Family:
    """All workloads of a policy and a micro-batch size: what ``make`` makes of ``samples``."""

    make: Callable[[int], Workload]
    size: int
    samples: range
    _made: dict[int, Workload] = field(default_factory=dict[int, Workload])

    def at(self, samples: int) -> Workload:
        """Returns the workload of so many samples."""
        if samples not in self._made:
            self._made[samples] = self.make(samples)
        return self._made[samples]

    def fitting(self, fits: Callable[[Workload], bool]) -> range:
        """Returns the samples of the workloads before the first one that does not fit."""
        number = bisect.bisect_left(self.samples, True, key=lambda one: not fits(self.at(one)))
        return self.samples[:number]


class RankFrontier:
    """The workloads of a rank, except those that do not fit on the GPU or take too long."""

    def __init__(
        self,
        problem: PlanProblem,
        host: Host,
        gpu: GpuProfile,
        collectives: Collectives,
        worst: float,
    ) -> None:
        """Workloads that take longer than ``worst`` seconds are left out."""
        self.host, self.gpu = host, gpu
        self._is_in_rounds = problem.rounds is not None

        def maker(size: int, policy: Activations) -> Callable[[int], Workload]:
            return lambda batch: workload(
                problem, gpu, collectives, batch, min(size, batch), policy
            )

        def fits(work: Workload) -> bool:
            return work.room >= 0.0 and work.compute <= worst

        idle = maker(0, problem.activations[0])(0)
        self._idle = [idle] if problem.allow_idle and idle.room >= 0.0 else []
        self._families: list[_Family] = []
        sizes = (0, *sizes_to_choose(problem, gpu, problem.batch))
        for policy, (below, size) in itertools.product(
            problem.activations, itertools.pairwise(sizes)
        ):
            # All rounds but the last are full.
            full = 0 if problem.rounds is None else (problem.rounds - 1) * size
            most = problem.batch if problem.rounds is None else problem.rounds * size
            family = _Family(
                maker(size, policy),
                size,
                range(max(below, full) + 1, min(problem.batch, most) + 1),
            )
            family.samples = family.fitting(fits)
            if family.samples:
                self._families.append(family)

    @property
    def extremes(self) -> list[Workload]:
        """The workloads with the fewest and the most samples of each policy and micro-batch."""
        families = self._families
        ends = [family.at(family.samples[end]) for family in families for end in (0, -1)]
        return [*ends, *self._idle]

    def most_samples(self, step: float) -> int:
        """Returns the most samples that fit in a step of so many seconds; -1: not even none do."""
        idle = any(one.compute <= step for one in self._idle)
        return max((ranged[-1] for _, ranged in self._in_time(step)), default=0 if idle else -1)

    def offers(self, step: float, least: int, *, bound: bool) -> list[Offer]:
        """Returns what a rank may do in a step of so many seconds, with ``least`` samples or more.

        ``bound``: whether no workload may be better than the offers; if not, each is a workload.
        """
        idle = [one for one in self._idle if one.compute <= step and least <= 0]
        found = [Offer(0, 0, one) for one in idle]
        families = [(one, ranged) for one, ranged in self._in_time(step) if ranged[-1] >= least]
        if self._is_in_rounds and not bound:
            # Few numbers of samples make these rounds: the largest alone seldom sum to the batch.
            fewest = ((family, max(least, ranged[0])) for family, ranged in families)
            found += [Offer(batch, family.size, family.at(batch)) for family, batch in fewest]
        most = max((ranged[-1] for _, ranged in families), default=0)
        before = max(0, least - 1)
        ranges = min(_MOST_RANGES, most - before)
        ends = [before + (most - before) * number // ranges for number in range(1, ranges + 1)]
        for end in ends:
            for family, ranged in families:
                if ranged[0] <= end and ranged[-1] > before:
                    fewest, most = max(before + 1, ranged[0]), min(end, ranged[-1])
                    work = family.at(fewest if bound else most)
                    found.append(Offer(most, family.size, work))
            before = end
        return found

    def _in_time(self, step: float) -> Iterator[tuple[_Family, range]]:
        """Yields each family's samples that are computed and copied in time, and fit the host."""
        offloaded = min(step * self.gpu.copy_rate, step * self.host.bandwidth / 2.0)
        offloaded = min(offloaded, self.host.memory_bytes) * (1.0 + 1e-9)

        def fits(work: Workload) -> bool:
            return work.compute <= step and work.offloaded <= offloaded

        for family in self._families:
            ranged = family.fitting(fits)
            if ranged:
                yield family, ranged
