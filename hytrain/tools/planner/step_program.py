"""Whether a batch and all state can be dealt in a step of a given length: a linear program.

With the step's length T everything else is linear. A rank with a workload and the first K layers on
its GPU can own a shard of up to some size, which cost_model.py knows (``largest_shards``); what
such a shard takes of its host is in proportion to it. So for each kind of ranks on a host (equal
GPUs are one kind, of which there are some number) and each offer (frontier.py) there are vertices:
no state, or some K with its largest shard. Of the numbers K those are vertices at which the largest
shard, against its CPU-placed part, bends. With w, how many ranks of the kind take a vertex,

    sum of w = ranks of the kind,  sum of w * (fewest, most samples) on either side of the batch
    for each host: sum of w * (bytes held), and of w * (bytes moved), <= what it has in T

the sum of w * shard is as large as can be: below 1 no plan has so short a step. Even shards are
vertices of their own, the largest K that holds 1/n, and the most samples are asked for. Every plan
is a solution; a solution is a plan but for ranks and layers that are in parts. HiGHS (Huangfu and
Hall, "Parallelizing the dual revised simplex method", 2018) solves the programs, by way of scipy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hytrain.errors import PlanError
from hytrain.formats.policies import Activations
from hytrain.tools.planner.arrays import Floats, Ints
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    Columns,
    host_budgets,
    largest_shards,
    longest_step,
)
from hytrain.tools.planner.frontier import RankFrontier
from hytrain.tools.planner.problem import PlanProblem

try:
    from scipy import optimize
except ImportError:  # training needs no scipy, and must not stop for it
    optimize = None

_ROUNDING = 1e-9
# Parts of ranks that are so little are none.
_WHOLE = 1e-6


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rank is to do.

    Attributes:
        samples: of the batch, not yet a whole number.
        size: of its micro-batches, at most.
        activations: policy.
    """

    samples: float
    size: int
    activations: Activations


@dataclass(frozen=True, slots=True)
class _Vertices:
    """What ranks of a kind may do, as columns; a row of each array is one.

    Attributes:
        groups: (policy, micro-batch size).
        group: which of them it is of.
        fewest: samples of a rank.
        samples: the most.
        shard: parameters of state.
        on_cpu: of these the CPU-placed ones.
        offloaded: bytes of activations.
    """

    groups: list[tuple[Activations, int]]
    group: Ints
    fewest: Floats
    samples: Floats
    shard: Floats
    on_cpu: Floats
    offloaded: Floats


@dataclass(slots=True)
class _Block:
    """The ranks of a kind on a host.

    Attributes:
        host: a number.
        kind: a number.
        count: ranks.
        vertices: that they may take.
        columns: of the program.
        whole: how many of them take each group; None while that is open.
    """

    host: int
    kind: int
    count: int
    vertices: _Vertices
    columns: slice
    whole: list[int] | None = None

    def parts(self, weights: Floats) -> Floats:
        """Of the ranks that take each group."""
        own = self.vertices
        sums = np.bincount(own.group, weights[self.columns], len(own.groups))
        return sums.astype(np.float64, copy=False)

    def choices(self, weights: Floats) -> list[Choice]:
        """What each of the ranks does."""
        own = self.vertices
        sums = np.bincount(own.group, weights[self.columns] * own.samples, len(own.groups))
        rows = zip(own.groups, self.parts(weights), sums.tolist(), self.whole or [], strict=True)
        return [
            Choice(samples / part, size, policy)
            for (policy, size), part, samples, number in rows
            for _ in range(number)
        ]


class StepProgram:
    """All ranks of a problem with even or with unequal shards."""

    def __init__(self, problem: PlanProblem, *, even: bool, worst: float = math.inf) -> None:
        """
        Args:
            problem: the ranks, and what is to be dealt to them.
            even: whether all shards are equal.
            worst: seconds of a step that is known to be possible: longer ones are of no interest.
        """
        self.problem = problem
        self.even = even
        collectives = Collectives.of(problem, even=even)
        # Equal GPUs are one kind, on hosts that differ in name only, too. All that is kept is by
        # the first one's number: to compare profiles takes long.
        hosts: dict[Host, int] = {}
        ranks: dict[tuple[int, GpuProfile], int] = {}
        self.kinds: list[RankFrontier] = []
        # For each host the kind of each of its ranks.
        self._hosts: list[tuple[int, ...]] = []
        for host in problem.cluster.hosts:
            alike = hosts.setdefault(replace(host, name=""), len(hosts))
            members: list[int] = []
            for gpu in host.gpus:
                own = ranks.setdefault((alike, gpu), len(ranks))
                if own == len(self.kinds):
                    self.kinds.append(RankFrontier(problem, host, gpu, collectives, worst))
                members.append(own)
            self._hosts.append(tuple(members))

    @property
    def ranks(self) -> list[RankFrontier]:
        """The workloads of each rank."""
        return [self.kinds[kind] for kinds in self._hosts for kind in kinds]

    @property
    def longest(self) -> float:
        """Seconds after which no further time would let anything more fit."""
        kinds = ((kind, kind.extremes) for kind in self.kinds)
        steps = (
            longest_step(self.problem, k.host, k.gpu, workloads)
            for k, workloads in kinds
            if workloads
        )
        return max(steps, default=0.0)

    def spare_samples(self, step: float) -> int:
        """By which the ranks could compute more than the batch in a step, whatever the state."""
        most = [kind.most_samples(step) for kind in self.kinds]
        ranks = [most[kind] for kinds in self._hosts for kind in kinds]
        return -1 if min(ranks) < 0 else sum(ranks) - self.problem.batch

    def choose(self, step: float) -> list[Choice] | None:
        """What each rank does; None where no plan has so short a step.

        An empty list where none of whole ranks is known.

        Args:
            step: seconds.
        """
        if self._solve(step, self._blocks(step, bound=True))[0] < 1.0 - _ROUNDING:
            return None
        held, choices = self._with_whole_ranks(step)
        return choices if held >= 1.0 - _ROUNDING else []

    def held(self, step: float) -> float:
        """What whole ranks hold of the state in such a step, as a share; even: of the batch."""
        return self._with_whole_ranks(step)[0]

    def _with_whole_ranks(self, step: float) -> tuple[float, list[Choice]]:
        """How much of the state they hold, and what each does.

        Ranks that are in parts are made whole one after another, those first that nearly are, and
        the program is solved again for the others.
        """
        blocks = self._blocks(step, bound=False)
        found, weights = self._solve(step, blocks)
        left = blocks
        while left and found > 0.0:
            parts = {id(block): block.parts(weights) for block in left}
            distance = {key: float(np.abs(own - own.round()).sum()) for key, own in parts.items()}
            block = min(left, key=lambda block: distance[id(block)])
            block.whole = whole_parts(parts[id(block)].tolist(), block.count)
            left = [other for other in left if other is not block]
            if distance[id(block)] > _WHOLE:
                found, weights = self._solve(step, blocks)
        if left or found <= 0.0:
            return 0.0, []
        chosen = {(block.host, block.kind): block.choices(weights) for block in blocks}
        hosts = enumerate(self._hosts)
        return found, [chosen[host, kind].pop() for host, kinds in hosts for kind in kinds]

    def _blocks(self, step: float, *, bound: bool) -> list[_Block]:
        """For each host and kind of its ranks; none where a rank can do nothing in time.

        ``bound``: see :meth:`RankFrontier.offers`.
        """
        spare = self.spare_samples(step)
        if spare < 0:
            return []
        vertices = [self._vertices(kind, step, spare, bound=bound) for kind in self.kinds]
        if not all(len(own.samples) for own in vertices):
            return []
        blocks: list[_Block] = []
        for host, kinds in enumerate(self._hosts):
            for kind in dict.fromkeys(kinds):
                begin = blocks[-1].columns.stop if blocks else 0
                columns = slice(begin, begin + len(vertices[kind].samples))
                blocks.append(_Block(host, kind, kinds.count(kind), vertices[kind], columns))
        return blocks

    def _solve(self, step: float, blocks: Sequence[_Block]) -> tuple[float, Floats]:
        """The most of the state (of the batch with even shards), and how many take each vertex."""
        if optimize is None:
            raise PlanError("planning needs scipy, whose solver it uses: pip install scipy")
        if not blocks:
            return 0.0, np.zeros(0)
        hosts = self.problem.cluster.hosts
        budgets = [host_budgets(self.problem, host, step) for host in hosts]
        width = blocks[-1].columns.stop
        upper, gain = np.zeros((2 * len(hosts) + 2, width)), np.zeros(width)
        equal: list[Floats] = []
        counts: list[int] = []
        batch, whole = self.problem.batch, self.problem.model.parameters
        for block in blocks:
            own, columns = block.vertices, block.columns
            for number, budget in enumerate(budgets[block.host]):
                taken = budget.takes(own.on_cpu, own.shard, own.offloaded)
                upper[2 * block.host + number, columns] = taken
            upper[-2:, columns] = own.fewest / batch, -own.samples / batch
            gain[columns] = own.samples / batch if self.even else own.shard / whole
            decided = block.whole is not None
            for group in range(len(own.groups) if decided else 1):
                row = np.zeros(width)
                row[columns] = own.group == group if decided else 1.0
                equal.append(row)
            counts += block.whole or [block.count]
        limits = np.append(np.ones(len(upper) - 1), -1.0)
        found: Any = optimize.linprog(
            -gain, A_ub=upper, b_ub=limits, A_eq=np.array(equal), b_eq=counts
        )
        return (0.0, np.zeros(0)) if found.x is None else (-found.fun, found.x)

    def _vertices(self, kind: RankFrontier, step: float, spare: int, *, bound: bool) -> _Vertices:
        problem = self.problem
        model = problem.model
        offers = kind.offers(step, kind.most_samples(step) - spare, bound=bound)
        works = [offer.work for offer in offers]
        shards = largest_shards(problem, kind.host, kind.gpu, Columns.of(works), step)
        shards = np.minimum(shards, float(model.parameters))  # no rank need hold more than all
        if self.even:
            each = model.parameters / problem.cluster.num_ranks
            enough = shards >= each * (1.0 - _ROUNDING)
            rows = np.flatnonzero(enough.any(axis=1))
            layers = shards.shape[1] - 1 - enough[rows, ::-1].argmax(axis=1)
            shard = np.full(len(rows), each)
        else:
            rows, layers = _bends(shards, model.gpu_parts)
            shard = np.where(layers < 0, 0.0, shards[rows, layers])
        keys: list[tuple[Activations, int]] = [(o.work.activations, o.size) for o in offers]
        groups = list(dict.fromkeys(keys))
        return _Vertices(
            groups=groups,
            group=np.array([groups.index(key) for key in keys])[rows],
            fewest=np.array([float(work.batch) for work in works])[rows],
            samples=np.array([float(offer.samples) for offer in offers])[rows],
            shard=shard,
            on_cpu=shard * (1.0 - model.gpu_parts[np.maximum(layers, 0)]),
            offloaded=np.array([work.offloaded for work in works])[rows],
        )


def _bends(shards: Floats, gpu_parts: Floats) -> tuple[Ints, Ints]:
    """(offer, GPU layers) of the vertices of what an offer may hold, -1 for no state.

    From the number of layers with the largest shard on, shards become smaller and so does their
    CPU-placed part; they lie on a line that bends where another limit binds.
    """
    possible = shards[:, 0] >= 0.0
    numbers = np.arange(len(gpu_parts))
    on_cpu = shards * (1.0 - gpu_parts)
    # The last of those with the most: it takes the least of the host.
    most = len(gpu_parts) - 1 - shards[:, ::-1].argmax(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.diff(shards, axis=1) / np.diff(on_cpu, axis=1)
        straight = np.abs(np.diff(slope, axis=1)) <= _ROUNDING * np.abs(slope[:, 1:])
    kept = np.zeros_like(shards, dtype=np.bool_)
    kept[:, 1:-1] = ~straight
    kept &= numbers >= most[:, None]
    kept[np.arange(len(shards)), most] = True
    kept[:, -1] = True
    kept &= (shards > 0.0) & possible[:, None]
    rows, layers = np.nonzero(kept)
    empty = np.flatnonzero(possible)
    return np.concatenate([rows, empty]), np.concatenate([layers, np.full(len(empty), -1)])


def whole_parts(parts: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to the parts, by largest remainder."""
    exact = [total * part / math.fsum(parts) for part in parts]
    found = [math.floor(part + _ROUNDING) for part in exact]
    order = sorted(range(len(exact)), key=lambda index: found[index] - exact[index])
    for index in order[: total - sum(found)]:
        found[index] += 1
    return found
