"""Whether a batch and all state can be dealt in a step of a given length: a mixed-integer program.

With the step's length T everything else is linear. A rank with a load and K of L layers on its
GPU can own a shard of up to some size, which cost_model.py knows (``largest_shards``); what such a
shard takes of its host is in proportion to it. So for each kind of ranks on a host (equal GPUs are
one kind, of which there are some number) and each chain of loads (rank_loads.py) there are

    y      how many of these ranks take a load of the chain                      (whole numbers)
    w      how many take a corner of the chain, with some K and that largest shard; their sum is y

A shard may be smaller: without state is a corner, too. Of the numbers K those are corners at which
the largest shard, against its CPU-placed part, bends. Then

    sum of y over the chains = ranks of the kind
    sum of w * shard = 1,  sum of w * samples = the batch
    for each host: sum of w * (bytes held), and of w * (bytes moved), <= what it has in T

Even shards are corners of their own, the largest K that holds 1/n. Every plan is a solution; a
solution is a plan but for whole layers of ranks that lie between two corners, and whole samples. So
where there is none no step is as short: with the shortest T that has one, found by bisection
(plan.py), plans come with a bound. HiGHS (Huangfu and Hall, "Parallelizing the dual revised simplex
method", 2018) solves the programs, by way of scipy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hytrain.formats.policies import Activations
from hytrain.tools.planner.chain_limits import ChainLimits
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import (
    Columns,
    HostBudget,
    host_budgets,
    largest_shards,
)
from hytrain.tools.planner.load_maker import LoadMaker
from hytrain.tools.planner.min_plus import Bools, Floats, Ints
from hytrain.tools.planner.mixed_integer import MixedIntegerProgram
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.rank_loads import Chain, RankLoads

_ROUNDING = 1e-9
# Branches, of a program of a thousand columns, of a larger one fewer. One that is not decided then
# counts as one that has a solution. Seconds would make plans depend on the machine.
_MOST_NODES = 400
_COLUMNS = 1000
# Where room is left, it is for no more than so many times the state.
_ROOMY = 1.25


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rank is to do.

    Attributes:
        samples: of the batch, not yet a whole number.
        microbatch: of them at once, at most.
        activations: policy.
    """

    samples: float
    microbatch: int
    activations: Activations


@dataclass(frozen=True, slots=True)
class _Corners:
    """What ranks of a kind may do, as columns; a row of each array is one.

    Attributes:
        chains: to choose from.
        chain: whose corner it is.
        load: its load, a position in the chain.
        samples: of a rank.
        shard: parameters / whole model.
        on_cpu: of these the CPU-placed ones.
        offloaded: bytes of activations.
    """

    chains: list[Chain]
    chain: Ints
    load: Ints
    samples: Floats
    shard: Floats
    on_cpu: Floats
    offloaded: Floats


class StepProgram:
    """All ranks of a problem with even or with unequal shards."""

    def __init__(
        self,
        problem: PlanProblem,
        *,
        even: bool,
        worst: float = math.inf,
        loads: LoadMaker | None = None,
    ) -> None:
        """
        Args:
            problem: the ranks, and what is to be dealt to them.
            even: whether all shards are equal.
            worst: seconds of a step that is known to be possible: longer ones are of no interest.
            loads: makes loads of this problem; None: :class:`LoadMaker`.
        """
        self.problem = problem
        self.even = even
        loads = loads or LoadMaker(problem, even=even)
        # Equal GPUs are one kind, on hosts that differ in name only, too. All that is kept is by
        # the first one's number: to compare profiles takes long.
        hosts: dict[Host, int] = {}
        ranks: dict[tuple[int, GpuProfile], int] = {}
        # Of the program that was solved last.
        self.num_columns = 0
        self.kinds: list[RankLoads] = []
        # For each host the kind of each of its ranks.
        self._hosts: list[tuple[int, ...]] = []
        for host in problem.cluster.hosts:
            alike = hosts.setdefault(replace(host, name=""), len(hosts))
            members: list[int] = []
            for gpu in host.gpus:
                own = ranks.setdefault((alike, gpu), len(ranks))
                if own == len(self.kinds):
                    self.kinds.append(RankLoads(problem, host, gpu, loads, worst))
                members.append(own)
            self._hosts.append(tuple(members))

    @property
    def catalogues(self) -> list[RankLoads]:
        """The loads of each rank."""
        return [self.kinds[kind] for kinds in self._hosts for kind in kinds]

    def covers(self, step: float) -> bool:
        """Whether the batch can be computed in a step, whatever the state."""
        most = [kind.most_samples(step) for kind in self.kinds]
        ranks = [most[kind] for kinds in self._hosts for kind in kinds]
        return min(ranks) >= 0 and sum(ranks) >= self.problem.batch

    def choose(
        self,
        step: float,
        *,
        whole: bool = True,
        roomy: bool = False,
        most_columns: float = math.inf,
    ) -> list[Choice] | None:
        """What each rank does; None where no plan has so short a step.

        An empty list where that is not known.

        Args:
            step: seconds.
            whole: whether ranks are; in parts they are solved faster, and more is possible.
            roomy: whether they leave as much room for more state as they can: then whole layers
                fit more easily.
            most_columns: a larger program is not solved.
        """
        corners = self._corners(step)
        if corners is None:
            return None
        held = (1.0, _ROOMY) if roomy else (1.0, 1.0)
        program, columns = self._program(step, corners, held, gains=roomy)
        self.num_columns = program.num_columns
        if program.num_columns > most_columns:
            return []
        solved, is_impossible = program.solve(whole=whole, most_nodes=_most_nodes(program))
        if is_impossible:
            return None
        return [] if solved is None or not whole else self._choices(corners, columns, solved)

    def held(self, step: float) -> float:
        """The most of the state that can be held, as a share, at most 1."""
        corners = self._corners(step)
        if corners is None:
            return 0.0
        program, _ = self._program(step, corners, (0.0, 1.0), gains=True)
        solved, _ = program.solve(whole=True, most_nodes=_most_nodes(program))
        if solved is None:
            return 0.0
        return program.gained(solved)

    def _least(self, step: float) -> list[int] | None:
        """Samples that a rank of each kind computes at least; None: the batch is too large."""
        most = [kind.most_samples(step) for kind in self.kinds]
        ranks = [most[kind] for kinds in self._hosts for kind in kinds]
        if min(ranks) < 0 or sum(ranks) < self.problem.batch:
            return None
        others = sum(ranks) - self.problem.batch
        return [own - others for own in most]

    def _corners(self, step: float) -> list[_Corners] | None:
        """Of each kind; None where a rank can do nothing in time, or all cannot do the batch."""
        least = self._least(step)
        if least is None:
            return None
        found: list[_Corners] = []
        for kind, own in zip(self.kinds, least, strict=True):
            corners = self._kind_corners(kind, step, kind.chains(step, own))
            if not len(corners.samples):
                return None
            found.append(corners)
        return found

    def _kind_corners(self, kind: RankLoads, step: float, chains: list[Chain]) -> _Corners:
        model = self.problem.model
        loads = [work for chain in chains for work in chain.loads]
        if not loads:
            none = np.zeros(0)
            return _Corners([], none.astype(np.intp), none.astype(np.intp), none, none, none, none)
        shards = largest_shards(self.problem, kind.host, kind.gpu, Columns.of(loads), step)
        shards = np.minimum(shards / model.parameters, 1.0)  # no rank need hold more than all
        chain = np.repeat(np.arange(len(chains)), [len(one.loads) for one in chains])
        place = np.concatenate([np.arange(len(one.loads)) for one in chains])
        # Between the loads of a chain other limits bind: these have rows of their own.
        alone = np.array([len(chains[number].loads) == 1 for number in chain])
        rows, layers = (
            self._even(shards, alone) if self.even else _bends(shards, alone, model.gpu_parts)
        )
        several = np.flatnonzero(~alone)
        rows = np.concatenate([rows, several])
        layers = np.concatenate([layers, np.full(len(several), -1)])
        on_cpu = 1.0 - model.gpu_parts[np.maximum(layers, 0)]
        shard = np.where(layers < 0, 0.0, shards[rows, layers])
        if self.even:
            shard = np.where(alone[rows], 1.0 / self.problem.cluster.num_ranks, 0.0)
        return _Corners(
            chains=chains,
            chain=chain[rows],
            load=place[rows],
            samples=np.array([float(work.batch) for work in loads])[rows],
            shard=shard,
            on_cpu=shard * on_cpu,
            offloaded=np.array([work.offloaded for work in loads])[rows],
        )

    def _even(self, shards: Floats, alone: Bools) -> tuple[Ints, Ints]:
        """Of each load that is a chain the most GPU layers with which it holds its part."""
        enough = shards >= (1.0 - _ROUNDING) / self.problem.cluster.num_ranks
        rows = np.flatnonzero(enough.any(axis=1) & alone)
        return rows, shards.shape[1] - 1 - enough[rows, ::-1].argmax(axis=1)

    def _program(
        self,
        step: float,
        corners: Sequence[_Corners],
        held: tuple[float, float],
        *,
        gains: bool,
    ) -> tuple[MixedIntegerProgram, list[list[tuple[Ints, Ints]]]]:
        """The program; for each host, and each of its kinds, the columns w and y.

        Args:
            step: seconds.
            corners: of each kind.
            held: the least and the most of the state, as a share.
            gains: whether as much state as can be is to be held.
        """
        program = MixedIntegerProgram()
        batch = program.row(1.0, 1.0 + 0.5 / self.problem.batch)
        state = program.row(*held) if not self.even else None
        columns: list[list[tuple[Ints, Ints]]] = []
        each = 1.0 / self.problem.cluster.num_ranks
        for host, kinds in zip(self.problem.cluster.hosts, self._hosts, strict=True):
            budgets = host_budgets(self.problem, host, step)
            limits = [program.row(-math.inf, 1.0) for _ in budgets]
            own: list[tuple[Ints, Ints]] = []
            for kind in dict.fromkeys(kinds):
                part = corners[kind]
                gain = part.shard if gains else 0.0
                taken = program.columns(len(part.samples), whole=False, gain=gain)
                numbers = program.columns(len(part.chains), whole=True)
                ranks = float(kinds.count(kind))
                program.entries(program.row(ranks, ranks), numbers, 1.0)
                rows = np.array([program.row(0.0, 0.0) for _ in part.chains])
                program.entries(rows, numbers, -1.0)
                program.entries(rows[part.chain], taken, 1.0)
                program.entries(batch, taken, part.samples / self.problem.batch)
                if state is not None:
                    program.entries(state, taken, part.shard)
                for row, budget in zip(limits, budgets, strict=True):
                    program.entries(row, taken, self._drawn(budget, part))
                several = ChainLimits(
                    self.problem, host, self.kinds[kind].gpu, step, program, gains
                )
                for number, chain in enumerate(part.chains):
                    if len(chain.loads) > 1:
                        own_taken = taken[part.chain == number]
                        state_of = several.add(chain.loads, own_taken, numbers[number : number + 1])
                        several.draw(budgets, limits, state_of)
                        several.hold(state, numbers[number : number + 1], state_of, each)
                own.append((taken, numbers))
            columns.append(own)
        return program, columns

    def _drawn(self, budget: HostBudget, corners: _Corners) -> Floats:
        """What a rank takes of its host, as a share of that."""
        state = budget.state * corners.on_cpu + budget.shard * corners.shard
        drawn = state * self.problem.model.parameters + budget.offloaded * corners.offloaded
        # A host without memory has nothing for anyone.
        return drawn / budget.total if budget.total > 0.0 else np.where(drawn > 0.0, 2.0**20, 0.0)

    def _choices(
        self,
        corners: Sequence[_Corners],
        columns: Sequence[Sequence[tuple[Ints, Ints]]],
        solved: Floats,
    ) -> list[Choice]:
        """Of the ranks in their order; those of a kind by chains."""
        found: list[Choice] = []
        for kinds, own in zip(self._hosts, columns, strict=True):
            distinct = dict.fromkeys(kinds)
            chosen = {
                kind: _chosen(corners[kind], solved[taken], solved[numbers])
                for kind, (taken, numbers) in zip(distinct, own, strict=True)
            }
            found += [chosen[kind].pop(0) for kind in kinds]
        return found

    def longest(self) -> float:
        """Seconds after which no further time would let anything more fit."""
        problem = self.problem
        whole = problem.model.parameters
        seconds = 0.0
        for kind in self.kinds:
            loads = kind.extremes
            if not loads:
                continue
            slowest = 2.0 * max(work.compute for work in loads)
            copied = problem.model.itemsize * whole + max(work.offloaded for work in loads)
            slopes = (line.slope for work in loads for line in work.fetches)
            copies = copied / kind.gpu.copy_rate + whole * max(slopes, default=0.0)
            updates = whole / kind.gpu.update_rate + whole / kind.host.rank_update_rate
            traffic = problem.state_traffic + problem.shard_traffic
            moved = traffic * whole / kind.host.bandwidth
            seconds = max(seconds, slowest + copies + updates + moved)
        return seconds


def _most_nodes(program: MixedIntegerProgram) -> int:
    return _MOST_NODES * _COLUMNS // max(_COLUMNS, program.num_columns)


def _bends(shards: Floats, alone: Bools, gpu_parts: Floats) -> tuple[Ints, Ints]:
    """(load, GPU layers) of the corners of what a load that is a chain may hold, -1 for no state.

    From the number of layers with the largest shard on, shards become smaller and so does their
    CPU-placed part; they lie on a line that bends where another limit binds.
    """
    possible = (shards[:, 0] >= 0.0) & alone
    num_layers = shards.shape[1] - 1
    numbers = np.arange(num_layers + 1)
    on_cpu = shards * (1.0 - gpu_parts)
    # The last of those with the most: it takes the least of the host.
    most = num_layers - shards[:, ::-1].argmax(axis=1)
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


def _chosen(corners: _Corners, taken: Floats, numbers: Floats) -> list[Choice]:
    """The ranks of one kind on one host."""
    found: list[Choice] = []
    for position, number in enumerate(np.rint(numbers).astype(int).tolist()):
        if not number:
            continue
        own = np.flatnonzero((corners.chain == position) & (taken > 0.0))
        chain = corners.chains[position]
        samples = float(taken[own] @ corners.samples[own]) / float(taken[own].sum())
        heaviest = own[int(taken[own].argmax())]
        work = chain.loads[int(corners.load[heaviest])]
        found += [Choice(samples, chain.microbatch, work.activations)] * number
    return found
