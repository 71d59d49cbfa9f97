"""How much state a cluster can hold while it computes the batch in a given time.

The state is counted in units: a whole number of them is the model. For a time T and a rank, every
load (samples, micro-batch, activations) leaves room for g units that the GPU keeps and updates and
for c that the CPU updates. The ranks of a host share its memory and bandwidth, H units in all, of
which offloaded activations draw some. A choice of loads on a host therefore holds

    min( sum (g - draw) + H,  sum (g + c) )      units,

so each load comes down to three numbers: samples, a = g - draw, d = g + c. A table over (samples,
sum of a) has the largest sum of d (:class:`HostTable`); hosts are then independent, and what they
hold for each number of samples adds up (cover.py).

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

import numpy as np
import numpy.typing as npt

from hytrain.planner.cluster import GpuProfile, Host
from hytrain.planner.cover import Ints, Steps, cheapest, least_costs
from hytrain.planner.loads import Collectives, Load, host_budgets
from hytrain.planner.menu import Menu
from hytrain.planner.offers import Grid, Offers, offers
from hytrain.planner.problem import PlanProblem

_Table = npt.NDArray[np.int64]

_NEVER = -(2**40)
# Columns of a host's table.
_MOST_COLUMNS = 512


class HostTable:
    """What the ranks of one host hold together, for each number of samples."""

    def __init__(
        self, members: Sequence[Offers], limit: int, grid: Grid, batch: int, host_most: int
    ) -> None:
        """
        Args:
            members: offers of each rank; none may be empty.
            limit: H, units that the host can hold and update.
            grid: the units.
            batch: samples of the global batch.
            host_most: units that the host can hold if it updates none of them.
        """
        self._members = members
        self._batch = min(batch, sum(int(offer.amounts.max()) for offer in members))
        # Where the host's limit binds no choice, only the sum of d counts.
        slack = sum(int((offer.holds - offer.keeps).max()) for offer in members) <= limit
        lowest = [0 if slack else min(0, int(offer.keeps.min())) for offer in members]
        self._keeps = [
            np.zeros_like(offer.keeps) if slack else offer.keeps - low
            for offer, low in zip(members, lowest, strict=True)
        ]
        self._limit = grid.units if slack else limit + sum(lowest)
        most = min(grid.units - sum(lowest), sum(int(keeps.max()) for keeps in self._keeps))
        # Offloaded activations may be many times the state: then sums of a are kept coarsely.
        coarse = -(-most // _MOST_COLUMNS) or 1
        up = coarse - 1 if grid.outer else 0
        self._keeps = [(keeps + up) // coarse for keeps in self._keeps]
        self._most = min(-(-most // coarse), sum(int(keeps.max()) for keeps in self._keeps))
        table = np.full((self._batch + 1, self._most + 1), _NEVER, dtype=np.int64)
        table[0, 0] = 0
        self._tables = [table]
        for offer, keeps in zip(members, self._keeps, strict=True):
            table = self._with(table, offer, keeps)
            self._tables.append(table)
        capped = np.minimum(table, np.arange(self._most + 1) * coarse + self._limit)
        self._best = np.minimum(capped, min(grid.units, host_most))

    def _with(self, table: _Table, offer: Offers, keeps: Ints) -> _Table:
        """One more rank: each demand is what is left of it for the others, or nothing."""
        wide = int(min(offer.amounts.max(), self._batch))
        deep = int(min(keeps.max(), self._most))
        padded = np.pad(table, ((wide, 0), (deep, 0)), mode="edge")
        rows, columns = table.shape
        result = np.full_like(table, _NEVER)
        for amount, keep, hold in zip(
            offer.amounts.tolist(), keeps.tolist(), offer.holds.tolist(), strict=True
        ):
            top, left = wide - min(amount, wide), deep - min(keep, deep)
            candidate = padded[top : top + rows, left : left + columns] + hold
            np.maximum(result, candidate, out=result)
        return result

    def steps(self) -> Steps:
        """(samples, less than nothing by what is held); labels are the samples."""
        best = self._best.max(axis=1)
        samples = np.flatnonzero(best > _NEVER // 2)
        steps = Steps.pareto(samples, -best[samples].astype(np.float64))
        return Steps(steps.amounts, steps.costs, samples[steps.labels])

    def trace(self, samples: int) -> list[int]:
        """The menu's position that each rank takes, for a label of :meth:`steps`."""
        row, column = samples, int(self._best[samples].argmax())
        labels: list[int] = []
        for number in reversed(range(len(self._members))):
            offer, keeps = self._members[number], self._keeps[number]
            rows = np.maximum(row - offer.amounts, 0)
            columns = np.maximum(column - keeps, 0)
            sums = self._tables[number][rows, columns] + offer.holds
            taken = int(sums.argmax())
            labels.append(int(offer.labels[taken]))
            row, column = int(rows[taken]), int(columns[taken])
        return labels[::-1]


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
        menus: dict[tuple[Host, GpuProfile], Menu] = {}
        for host, gpu in problem.cluster.ranks:
            kind = (_nameless(host), gpu)
            if kind not in menus:
                menus[kind] = Menu.of(problem, host, gpu, collectives, worst)
        self.menus = menus
        num_ranks = problem.cluster.num_ranks
        units = max(512, min(16 * num_ranks, 2048))
        self._units = -(-units // num_ranks) * num_ranks

    def menu(self, host: Host, gpu: GpuProfile) -> Menu:
        """The loads of a rank."""
        return self.menus[_nameless(host), gpu]

    def choose(self, step: float, *, outer: bool) -> list[Load] | None:
        """A load for each rank that leaves room for all state; None where there are none.

        The samples may be more than the batch.
        """
        problem = self.problem
        grid = self._grid(outer)
        tables = self._tables(step, grid)
        if tables is None:
            return None
        hosts = problem.cluster.hosts
        steps = {kind: table.steps() for kind, table in tables.items()}
        members = [steps[_nameless(host)] for host in hosts]
        if -least_costs(members, problem.batch)[problem.batch] < grid.units:
            return None
        chosen: list[Load] = []
        for host, samples in zip(hosts, cheapest(members, problem.batch), strict=True):
            positions = tables[_nameless(host)].trace(samples)
            for gpu, position in zip(host.gpus, positions, strict=True):
                chosen.append(self.menu(host, gpu).loads[position])
        return chosen

    def covers(self, step: float) -> bool:
        """Whether the batch can be computed in a step, by the outer reading, whatever the state."""
        samples = 0
        for host, gpu in self.problem.cluster.ranks:
            menu = self.menu(host, gpu)
            able = (menu.outer.compute <= step) & (menu.outer.offloaded <= step * gpu.copy_rate)
            if not able.any():
                return False
            samples += int(menu.samples(step, outer=True)[able].max())
        return samples >= self.problem.batch

    def held(self, step: float) -> float:
        """The most of the state that can be held, as a share, by the outer reading."""
        grid = self._grid(outer=True)
        tables = self._tables(step, grid)
        if tables is None:
            return 0.0
        steps = {kind: table.steps() for kind, table in tables.items()}
        members = [steps[_nameless(host)] for host in self.problem.cluster.hosts]
        most = -float(least_costs(members, self.problem.batch)[self.problem.batch])
        return max(0.0, most / grid.units)

    def _grid(self, outer: bool) -> Grid:
        most = self._units // self.problem.cluster.num_ranks if self.even else self._units
        return Grid(self._units, most, outer)

    def _tables(self, step: float, grid: Grid) -> dict[Host, HostTable] | None:
        """For each kind of host; None where a rank can do nothing in time."""
        problem = self.problem
        offered = {kind: offers(problem, menu, step, grid) for kind, menu in self.menus.items()}
        if not all(len(offer.amounts) for offer in offered.values()):
            return None
        tables: dict[Host, HostTable] = {}
        for host in problem.cluster.hosts:
            kind = _nameless(host)
            if kind not in tables:
                budgets = host_budgets(problem, host, step)
                limit = grid.limit(min(one.capacity for one in budgets), problem.model.parameters)
                most = grid.limit(min(one.most for one in budgets), problem.model.parameters)
                members = [offered[kind, gpu] for gpu in host.gpus]
                tables[kind] = HostTable(members, limit, grid, problem.batch, most)
        return tables

    def longest(self) -> float:
        """Seconds after which no further time would let anything more fit."""
        problem = self.problem
        whole = problem.model.parameters
        seconds = 0.0
        for menu in self.menus.values():
            if not menu.loads:
                continue
            slowest = 2.0 * float(menu.inner.compute.max())
            copied = problem.model.itemsize * whole + float(menu.inner.offloaded.max())
            copies = copied / menu.gpu.copy_rate
            copies += whole * float(menu.inner.slope.max(initial=0.0))
            updates = whole / menu.gpu.update_rate + whole / menu.host.rank_update_rate
            traffic = problem.state_traffic + problem.shard_traffic
            moved = traffic * whole / menu.host.bandwidth
            seconds = max(seconds, slowest + copies + updates + moved)
        return seconds


def _nameless(host: Host) -> Host:
    """Hosts that differ in name only are one kind."""
    return Host("", host.gpus, host.cores, host.memory_bytes, host.bandwidth, host.update_rates)
