"""Whether the batch and all state fit a step of a given length, by a mixed-integer program.

For a given length T of the step everything else is linear. A rank with a workload and the first K
layers on its GPU can own a shard of up to some size, which cost_model.py computes
(``largest_shards``); what such a shard takes of its host is proportional to it. So for each kind of
rank on a host (equal GPUs are one kind, with a count) and each offer (frontier.py) there are
vertices: no state, or some K with its largest shard. Only those K are vertices at which the largest
shard, drawn against its CPU-placed part, bends. With w, how many ranks of the kind take a vertex,

    sum of w = ranks of the kind,  sum of w * (fewest, most samples) on either side of the batch
    for each host: sum of w * (bytes held), and of w * (bytes moved), <= what it has in T
    sum of w * shard >= 1, and about as large as possible
    for each policy and micro-batch size of a kind: sum of w is a whole number

Even shards have vertices of their own, the largest K that can hold 1/n, and the samples are
maximized instead. Every plan is a solution, so if there is none, no plan has so short a step. A
solution is a plan, except that samples and layers are fractional. HiGHS (Huangfu and Hall,
"Parallelizing the dual revised simplex method", 2018) solves the programs, through scipy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hytrain.errors import PlanError
from hytrain.formats.policies import Activations
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Collectives,
    host_parts,
    largest_shards,
    longest_step,
)
from hytrain.tools.planner.frontier import RankFrontier
from hytrain.tools.planner.problem import Floats, Ints, PlanProblem
from hytrain.tools.stdout import stdout_to

try:
    from scipy import optimize
except ImportError:  # training needs no scipy, and must not stop for it
    optimize = None

_ROUNDING = 1e-9
# The most branches looked at: a time limit would make plans depend on the machine. The search ends
# at a solution that holds nearly as much as possible (_ROOMY).
_MOST_NODES = 400
_ROOMY = 0.05
# HiGHS's status of an infeasible program.
_IMPOSSIBLE = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rank is to do.

    Attributes:
        samples: its part of the batch, not yet a whole number.
        size: largest size of its micro-batches.
    """

    samples: float
    size: int
    activations: Activations


@dataclass(frozen=True, slots=True)
class _Vertices:
    """What ranks of a kind may do, as columns of the program; each array has an entry per vertex.

    Attributes:
        groups: (policy, micro-batch size).
        group: number of the vertex's group.
        fewest: fewest samples of a rank.
        samples: most samples of a rank.
        shard: parameters of state.
        on_cpu: parameters of the shard that are CPU-placed.
        offloaded: bytes of offloaded activations.
    """

    groups: list[tuple[Activations, int]]
    group: Ints
    fewest: Floats
    samples: Floats
    shard: Floats
    on_cpu: Floats
    offloaded: Floats


@dataclass(frozen=True, slots=True)
class _Block:
    """The ranks of a kind on a host."""

    host: int
    kind: int
    count: int
    vertices: _Vertices
    columns: slice

    def choices(self, weights: Floats, *, even: bool) -> list[Choice]:
        """Returns what each rank does, with fractions of ranks mixed into whole ones.

        ``even``: equal shards go with equal work. With unequal ones the vertices of a group are
        dealt in order of their samples, so that only neighbours are mixed: the mean of all may need
        more micro-batches than most of them, and leave less room for state.
        """
        own, weights = self.vertices, weights[self.columns]
        found: list[Choice] = []
        for group, (policy, size) in enumerate(own.groups):
            rows = np.flatnonzero(own.group == group)
            rows = rows[own.samples[rows].argsort(kind="stable")]
            ends = np.append(0.0, weights[rows].cumsum())
            sums = np.append(0.0, (weights[rows] * own.samples[rows]).cumsum())
            if even:
                ends, sums = ends[[0, -1]], sums[[0, -1]]
            ranks = np.linspace(0.0, ends[-1], round(ends[-1]) + 1)
            means = np.diff(np.interp(ranks, ends, sums)) / np.diff(ranks)
            found += [Choice(samples, size, policy) for samples in means.tolist()]
        return found


class StepProgram:
    """The program of all ranks of a problem, with even or with unequal shards."""

    def __init__(self, problem: PlanProblem, *, even: bool, worst: float = math.inf) -> None:
        """``even``: whether all shards are equal. Steps longer than ``worst`` seconds, known to be
        possible, are of no interest."""
        self.problem = problem
        self.even = even
        collectives = Collectives.of(problem, even=even)
        # Equal GPUs are one kind, also on hosts that differ only in name. Everything is kept by the
        # kind's number: comparing profiles takes long.
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
        """Seconds beyond which a longer step lets nothing more fit."""
        kinds = ((kind, kind.extremes) for kind in self.kinds)
        steps = (
            longest_step(self.problem, k.host, k.gpu, workloads)
            for k, workloads in kinds
            if workloads
        )
        return max(steps, default=0.0)

    def spare_samples(self, step: float) -> int:
        """Returns by how many samples the ranks exceed the batch in a step, ignoring state."""
        most = [kind.most_samples(step) for kind in self.kinds]
        ranks = [most[kind] for kinds in self._hosts for kind in kinds]
        return -1 if min(ranks) < 0 else sum(ranks) - self.problem.batch

    def choose(self, step: float) -> list[Choice] | None:
        """Returns what each rank does; None if no plan has so short a step.

        An empty list if that is not known.
        """
        bound = self._blocks(step, bound=True)
        # First with fractional ranks: that is decided faster, and mostly rules out as much.
        if self._solve(step, bound, whole=False)[1]:
            return None
        blocks = self._blocks(step, bound=False)
        weights, is_denied = self._solve(step, blocks, whole=True)
        if weights is None:
            return None if is_denied and self._solve(step, bound, whole=True)[1] else []
        chosen = {
            (block.host, block.kind): block.choices(weights, even=self.even) for block in blocks
        }
        hosts = enumerate(self._hosts)
        return [chosen[host, kind].pop() for host, kinds in hosts for kind in kinds]

    def held(self, step: float) -> float:
        """Returns the share of the state that whole ranks with unequal shards hold in a step."""
        blocks = self._blocks(step, bound=False)
        weights, _ = self._solve(step, blocks, whole=True, least=0.0)
        if weights is None:
            return 0.0
        held = sum(float(weights[block.columns] @ block.vertices.shard) for block in blocks)
        return held / self.problem.model.parameters

    def _blocks(self, step: float, *, bound: bool) -> list[_Block]:
        """Returns a block per host and kind of its ranks; none if a rank can do nothing in time.

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

    def _solve(
        self, step: float, blocks: Sequence[_Block], *, whole: bool, least: float = 1.0
    ) -> tuple[Floats | None, bool]:
        """Returns how many ranks take each vertex, holding about the most state; whether none can.

        With even shards they compute about the most samples instead. Neither is known of a program
        that takes too long. ``whole``: whether ranks with the same policy and micro-batches must be
        a whole number; ``least``: share of the state to hold at least.
        """
        if optimize is None:
            raise PlanError("planning needs scipy, whose solver it uses: pip install scipy")
        if not blocks:
            return None, True
        hosts = self.problem.cluster.hosts
        vertices = blocks[-1].columns.stop
        # After the vertices, how many ranks are in each group.
        width = vertices + whole * sum(len(block.vertices.groups) for block in blocks)
        upper, gain = np.zeros((2 * len(hosts) + 3, width)), np.zeros(width)
        equal: list[Floats] = []
        counts: list[int] = []
        batch, state = self.problem.batch, self.problem.model.parameters
        last = vertices
        for block in blocks:
            own, columns = block.vertices, block.columns
            first, host = 2 * block.host, hosts[block.host]
            upper[first : first + 2, columns] = host_parts(
                self.problem, host, step, own.shard - own.on_cpu, own.on_cpu, own.offloaded
            )
            upper[-3:-1, columns] = own.fewest / batch, -own.samples / batch
            gain[columns] = own.samples / batch if self.even else own.shard / state
            row = np.zeros(width)
            row[columns] = 1.0
            equal.append(row)
            counts.append(block.count)
            for group in range(len(own.groups) if whole else 0):
                row = np.zeros(width)
                row[columns] = own.group == group
                row[last] = -1.0
                last += 1
                equal.append(row)
                counts.append(0)
        upper[-1] = -gain
        limits = np.concatenate([np.ones(len(upper) - 2), [-1.0, -least * (1.0 - _ROUNDING)]])
        lower = np.concatenate([np.full(len(upper), -math.inf), counts])
        limited: Any = optimize.LinearConstraint  # its stubs accept only numbers
        constraints = limited(np.vstack([upper, equal]), lower, np.append(limits, counts))
        options = {"node_limit": _MOST_NODES, "mip_rel_gap": _ROOMY * least}
        integrality = (np.arange(width) >= vertices).astype(np.float64)
        # HiGHS sometimes prints a line of its own, whatever its options.
        with open(os.devnull, "wb") as nowhere, stdout_to(nowhere.fileno()):
            found = optimize.milp(
                -gain, integrality=integrality, constraints=constraints, options=options
            )
        return found.x, found.status == _IMPOSSIBLE

    def _vertices(self, kind: RankFrontier, step: float, spare: int, *, bound: bool) -> _Vertices:
        problem = self.problem
        model = problem.model
        offers = kind.offers(step, kind.most_samples(step) - spare, bound=bound)
        works = [offer.work for offer in offers]
        shards = largest_shards(problem, kind.host, kind.gpu, works, step)
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
    """Returns (offer, GPU layers) of the vertices of what an offer may hold; -1: no state.

    Beyond the number of GPU layers with the largest shard, shards become smaller and so does their
    CPU-placed part: they lie on a line that bends where another limit binds.
    """
    possible = shards[:, 0] >= 0.0
    numbers = np.arange(len(gpu_parts))
    on_cpu = shards * (1.0 - gpu_parts)
    # The last of those with the largest shard: it takes the least of the host.
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
    """Returns whole numbers in proportion to the parts, by largest remainder."""
    exact = [total * part / math.fsum(parts) for part in parts]
    found = [math.floor(part + _ROUNDING) for part in exact]
    order = sorted(range(len(exact)), key=lambda index: found[index] - exact[index])
    for index in order[: total - sum(found)]:
        found[index] += 1
    return found
