"""How much state a cluster can hold while it computes the batch in a given time.

The state is counted in units: a whole number of them is the model. For a time T and a rank, every
load (samples, micro-batch, activations) leaves room for g units that the GPU keeps and updates and
for c that the CPU updates. The ranks of a host share its memory and bandwidth, H units in all, of
which offloaded activations draw some. A choice of loads on a host therefore holds

    min( sum (g - draw) + H,  sum (g + c) )      units,

so each load comes down to three numbers: samples, a = g - draw, d = g + c. A table over (samples,
sum of a) has the largest sum of d (host_table.py); hosts are then independent, and what they
hold for each number of samples adds up (min_plus.py).

With ``offload_param`` a unit that a GPU keeps takes something of the host, too: its weights. Then g
counts in a by the part that it does not take, and there is a second limit, of weights alone.

Two readings of every number make it a bound on either side. *Inner*: whatever is held is rounded
down, whatever is drawn up, and the choice can be carried out but for whole layers where a host's
limit binds. *Outer*: the other way around, and
what is impossible here is impossible. Between them lie the grid (a unit a rank), the corners that
stage 3 cuts off, whole layers where a host's limit binds, and, where a batch is no multiple of its
micro-batch, its kept activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hytrain.tools.planner.candidate_loads import CandidateLoads
from hytrain.tools.planner.cluster import GpuProfile, Host
from hytrain.tools.planner.cost_model import Collectives, Load, host_budgets
from hytrain.tools.planner.host_table import HostTable
from hytrain.tools.planner.min_plus import StepFunction, cheapest, least_costs
from hytrain.tools.planner.pareto_set import Grid, ParetoSet, offers
from hytrain.tools.planner.problem import PlanProblem


class Frontier:
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
        # Hosts that differ in name only are one kind, and so are their equal GPUs. All that is
        # kept is by the first one's number: to compare profiles takes long.
        hosts: dict[Host, int] = {}
        ranks: dict[tuple[int, GpuProfile], int] = {}
        self.kinds: list[CandidateLoads] = []
        # For each host its kind, and those of its ranks.
        self._hosts: list[tuple[int, tuple[int, ...]]] = []
        for host in problem.cluster.hosts:
            kind = hosts.setdefault(_nameless(host), len(hosts))
            members: list[int] = []
            for gpu in host.gpus:
                own = ranks.setdefault((kind, gpu), len(ranks))
                if own == len(self.kinds):
                    self.kinds.append(CandidateLoads(problem, host, gpu, collectives, worst))
                members.append(own)
            self._hosts.append((kind, tuple(members)))
        num_ranks = problem.cluster.num_ranks
        units = max(512, min(16 * num_ranks, 2048))
        self._units = -(-units // num_ranks) * num_ranks

    @property
    def catalogues(self) -> list[CandidateLoads]:
        """The loads of each rank."""
        return [self.kinds[kind] for _, kinds in self._hosts for kind in kinds]

    def choose(self, step: float, *, outer: bool) -> list[Load] | None:
        """A load for each rank that leaves room for all state; None where there are none.

        The samples may be more than the batch.
        """
        grid = self._grid(outer)
        tables = self._tables(step, grid)
        if tables is None:
            return None
        members, demand = self._members(tables)
        if -least_costs(members, demand)[demand] < grid.units:
            return None
        chosen: list[Load] = []
        for (kind, _), samples in zip(self._hosts, cheapest(members, demand), strict=True):
            chosen += tables[kind].trace(samples)
        return chosen

    def covers(self, step: float) -> bool:
        """Whether the batch can be computed in a step, by the outer reading, whatever the state."""
        most = [kind.most_samples(step, outer=True) for kind in self.kinds]
        ranks = [most[kind] for _, kinds in self._hosts for kind in kinds]
        return min(ranks) >= 0 and sum(ranks) >= self.problem.batch

    def held(self, step: float) -> float:
        """The most of the state that can be held, as a share, by the outer reading."""
        grid = self._grid(outer=True)
        tables = self._tables(step, grid)
        if tables is None:
            return 0.0
        members, demand = self._members(tables)
        most = -float(least_costs(members, demand)[demand])
        return max(0.0, most / grid.units)

    def _members(self, tables: dict[int, HostTable]) -> tuple[list[StepFunction], int]:
        """What each host offers beyond what it must compute, and the samples that are left."""
        steps = {kind: table.steps() for kind, table in tables.items()}
        left = self.problem.batch - sum(tables[kind].least for kind, _ in self._hosts)
        return [steps[kind] for kind, _ in self._hosts], left

    def _grid(self, outer: bool) -> Grid:
        most = self._units // self.problem.cluster.num_ranks if self.even else self._units
        return Grid(self._units, most, outer)

    def _offers(self, step: float, grid: Grid) -> list[ParetoSet] | None:
        """Of each kind of rank, those with as many samples as the others may leave for it.

        None where a rank can do nothing in time, or all together cannot do the batch.
        """
        most = [kind.most_samples(step, outer=grid.outer) for kind in self.kinds]
        if min(most) < 0:
            return None
        least = self._least(most)
        if least is None:
            return None
        offered: list[ParetoSet] = []
        for kind, own in zip(self.kinds, least, strict=True):
            offered.append(offers(self.problem, kind, step, grid, own))
        if not all(len(offer.amounts) for offer in offered):
            return None
        # Memory may allow less than time does: the others' least is more then.
        least = self._least([int(offer.amounts.max()) for offer in offered])
        if least is None:
            return None
        return [offer.of_at_least(own) for offer, own in zip(offered, least, strict=True)]

    def _least(self, most: Sequence[int]) -> list[int] | None:
        """Of each kind of rank, by the most of each; None where that is less than the batch."""
        ranks = [most[kind] for _, kinds in self._hosts for kind in kinds]
        if sum(ranks) < self.problem.batch:
            return None
        others = sum(ranks) - self.problem.batch
        return [max(0, own - others) for own in most]

    def _tables(self, step: float, grid: Grid) -> dict[int, HostTable] | None:
        """For each kind of host; None where a rank can do nothing in time."""
        problem = self.problem
        offered = self._offers(step, grid)
        if offered is None:
            return None
        most = [sum(int(offered[own].amounts.max()) for own in kinds) for _, kinds in self._hosts]
        spare = sum(most) - problem.batch
        tables: dict[int, HostTable] = {}
        for host, (kind, kinds), able in zip(problem.cluster.hosts, self._hosts, most, strict=True):
            if kind in tables:
                continue
            budgets = host_budgets(problem, host, step)
            limit = grid.limit(min(one.capacity for one in budgets), problem.model.parameters)
            host_most = grid.limit(min(one.most for one in budgets), problem.model.parameters)
            rows = range(max(0, able - spare), min(problem.batch, able) + 1)
            members = [offered[own] for own in kinds]
            tables[kind] = HostTable(members, limit, grid, rows, host_most)
        return tables

    def longest(self) -> float:
        """Seconds after which no further time would let anything more fit."""
        problem = self.problem
        whole = problem.model.parameters
        seconds = 0.0
        for kind in self.kinds:
            menu = kind.longest
            if not menu.loads:
                continue
            slowest = 2.0 * float(menu.inner.compute.max())
            copied = problem.model.itemsize * whole + float(menu.inner.offloaded.max())
            copies = copied / kind.gpu.copy_rate
            copies += whole * float(menu.inner.slope.max(initial=0.0))
            updates = whole / kind.gpu.update_rate + whole / kind.host.rank_update_rate
            traffic = problem.state_traffic + problem.shard_traffic
            moved = traffic * whole / kind.host.bandwidth
            seconds = max(seconds, slowest + copies + updates + moved)
        return seconds


def _nameless(host: Host) -> Host:
    """Hosts that differ in name only are one kind."""
    return Host("", host.gpus, host.cores, host.memory_bytes, host.bandwidth, host.update_rates)
