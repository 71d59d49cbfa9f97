"""Makes loads; of any number of rounds from those of three and of four."""

from __future__ import annotations

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, Load, load
from hytrain.tools.planner.passes import FetchLine
from hytrain.tools.planner.problem import PlanProblem

# From so many rounds on each further one adds the same.
_FIRST = 3


class LoadMaker:
    """Makes the loads of a problem with even or with unequal shards."""

    def __init__(self, problem: PlanProblem, *, even: bool) -> None:
        """
        Args:
            problem: what is planned.
            even: whether all shards are equal.
        """
        self.problem = problem
        self.collectives = Collectives.of(problem, even=even)

    def of(self, gpu: GpuProfile, batch: int, size: int, policy: Activations) -> Load:
        """What ``batch`` samples take, ``size`` at once; 0 and 0 for none."""
        return load(self.problem, gpu, self.collectives, batch, size, policy)


class RoundLoads:
    """Loads of ranks that make some number of rounds, each but the last a full micro-batch.

    With full micro-batches of a size and a last one of a size, times are linear in the number of
    rounds from three on, and memory is the same. So few are worked out for all numbers.
    """

    def __init__(self, problem: PlanProblem, *, even: bool) -> None:
        """
        Args:
            problem: what is planned, with whatever number of rounds.
            even: whether all shards are equal.
        """
        self._problem = problem
        self._collectives = Collectives.of(problem, even=even)
        # By the profile's identity: to compare profiles takes long.
        self._pairs: dict[tuple[int, int, int, Activations], tuple[Load, Load]] = {}

    def of(self, gpu: GpuProfile, rounds: int, last: int, size: int, policy: Activations) -> Load:
        """The load with micro-batches of ``size``, but for a last one of ``last``."""
        if rounds < _FIRST:
            batch = (rounds - 1) * size + last
            return load(self._problem, gpu, self._collectives, batch, min(size, batch), policy)
        key = id(gpu), last, size, policy
        if key not in self._pairs:
            few, more = (
                load(self._problem, gpu, self._collectives, number * size + last, size, policy)
                for number in (_FIRST - 1, _FIRST)
            )
            self._pairs[key] = few, more
        return _extrapolated(*self._pairs[key], rounds - _FIRST)

    def maker(self, problem: PlanProblem) -> LoadMaker:
        """For a problem with some number of rounds."""
        return _RoundsMaker(problem, self, self._collectives)


class _RoundsMaker(LoadMaker):
    def __init__(self, problem: PlanProblem, loads: RoundLoads, collectives: Collectives) -> None:
        self.problem = problem
        self.collectives = collectives
        self._loads = loads

    def of(self, gpu: GpuProfile, batch: int, size: int, policy: Activations) -> Load:
        rounds = self.problem.rounds
        if not batch or rounds is None:
            return super().of(gpu, batch, size, policy)
        return self._loads.of(gpu, rounds, batch - (rounds - 1) * size, size, policy)


def _extrapolated(few: Load, more: Load, number: int) -> Load:
    """The load with so many rounds more than ``few``, which has one less than ``more``."""
    return Load(
        batch=few.batch + number * few.microbatch,
        microbatch=few.microbatch,
        activations=few.activations,
        compute=few.compute + number * (more.compute - few.compute),
        edge=few.edge + number * (more.edge - few.edge),
        room=few.room,
        end_room=few.end_room,
        offloaded=0.0,
        fetches=tuple(
            FetchLine(
                one.slope + number * (other.slope - one.slope),
                one.hidden + number * (other.hidden - one.hidden),
            )
            for one, other in zip(few.fetches, more.fetches, strict=True)
        ),
    )
