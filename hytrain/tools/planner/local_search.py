"""Improves a plan by its simulated step: state, layers and samples are moved.

The search (search.py) uses roofline bounds: a rank's CPU has the whole step except a startup,
whenever its gradients come. Many plans are equally good by these but not when they are simulated:
if every step is clipped, a layer that the CPU updates late is waited for. So small changes to a
plan are tried, and the best of each round is taken while the simulated step becomes shorter:

- state from one rank's shard to another's, each keeping as many layers on its GPU as fit;
- a sample from one rank to another, each with its fastest micro-batch;
- another policy for a rank's activations, or other micro-batches, which leave more room.

Equal ranks (the same GPU, work and share, on equal hosts) change together, except for samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cost_model import (
    Collectives,
    Workload,
    gpu_layers_that_fit,
    host_bytes,
    workload,
)
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Found, parts, roofline_step
from hytrain.tools.planner.search import Dealer

_MOVED = (0.16, 0.04, 0.01)
"""Shares of the model's state to move from one kind of ranks to another."""
_SIZES = 4
"""How many sizes of micro-batches to try on either side of a rank's own."""
_GAIN = 1e-3
"""A change that gains less than this share of the step is not made."""
_MOST_TRIES = 600
"""The most changes that are simulated, in all rounds."""


def local_search(problem: PlanProblem, found: Found) -> Found:
    """Returns the plan, or one whose simulated steps are shorter; even shards stay even."""
    return _Refinement(problem, found).run()


def unevenly(problem: PlanProblem, found: Found) -> Found:
    """Returns a plan of even shards as one of unequal shards, whose collectives take longer."""
    collectives = Collectives.of(problem, even=False)
    workloads = tuple(
        workload(problem, gpu, collectives, work.batch, work.microbatch, work.activations)
        for (_, gpu), work in zip(problem.cluster.ranks, found.workloads, strict=True)
    )
    return Found(
        workloads, found.shares, roofline_step(problem, workloads, found.shares), even=False
    )


class _Refinement:
    def __init__(self, problem: PlanProblem, found: Found) -> None:
        self._problem = problem
        self._even = found.even
        self._dealer = Dealer(problem, even=found.even)
        self._gpus = [gpu for _, gpu in problem.cluster.ranks]
        self._hosts = [replace(host, name="") for host, _ in problem.cluster.ranks]
        self._tries = 0
        self._found = found

    def run(self) -> Found:
        """See :func:`local_search`; until the end ``Found.step`` is the simulated step."""
        now = first = self._simulated(self._found.workloads, self._found.shares)
        if now is None:
            return self._found
        while True:
            best = min(self._round(now), key=lambda found: found.step, default=now)
            if best.step >= now.step * (1.0 - _GAIN):
                break
            now = best
        if now is first:
            return self._found
        return replace(now, step=roofline_step(self._problem, now.workloads, now.shares))

    def _round(self, now: Found) -> Iterator[Found]:
        for workloads, shares in self._changes(now):
            if self._tries >= _MOST_TRIES:
                return
            simulated = self._simulated(workloads, shares)
            if simulated is not None:
                yield simulated

    def _simulated(self, workloads: Sequence[Workload], shares: Sequence[Share]) -> Found | None:
        """Returns them with their simulated step; None if the hosts have no room."""
        problem = self._problem
        for host, ranks in problem.cluster.host_ranks:
            held = sum(
                host_bytes(problem, *parts(problem, shares[rank]), workloads[rank].offloaded)
                for rank in ranks
            )
            if held > host.memory_bytes:
                return None
        self._tries += 1
        least = roofline_step(problem, workloads, shares)
        simulated = PlannedStep(problem, workloads, shares, even=self._even).seconds()
        return Found(tuple(workloads), tuple(shares), max(least, simulated), self._even)

    def _changes(self, now: Found) -> Iterator[tuple[list[Workload], list[Share]]]:
        kinds: dict[object, list[int]] = {}
        rows = zip(self._hosts, self._gpus, now.workloads, now.shares, strict=True)
        for rank, kind in enumerate(rows):
            kinds.setdefault(kind, []).append(rank)
        members = list(kinds.values())
        for alike in members:
            yield from self._other_work(now, alike)
        for one, other in itertools.permutations(members, 2):
            if not self._even:
                yield from self._moved_state(now, one, other)
            yield from self._moved_samples(now, one[0], other[0])

    def _shares(
        self, workloads: Sequence[Workload], shares: Sequence[Share], changed: Sequence[int]
    ) -> list[Share] | None:
        """Returns the shares, the changed ones with all GPU layers that fit; None: not even 0."""
        fitting = list(shares)
        for rank in changed:
            shard = shares[rank].fraction * self._problem.model.parameters
            layers = gpu_layers_that_fit(self._problem, workloads[rank], shard)
            if layers < 0:
                return None
            fitting[rank] = replace(shares[rank], gpu_layers=layers)
        return fitting

    def _other_work(
        self, now: Found, alike: Sequence[int]
    ) -> Iterator[tuple[list[Workload], list[Share]]]:
        work, gpu = now.workloads[alike[0]], self._gpus[alike[0]]
        if not work.batch:
            return
        others = [
            self._dealer.fastest(gpu, work.batch, policy)
            for policy in self._problem.activations
            if policy != work.activations
        ]
        sizes = gpu.micro_batches(work.batch)
        smaller = [size for size in sizes if size < work.microbatch][-_SIZES:]
        larger = [size for size in sizes if size > work.microbatch][:_SIZES]
        others += [
            self._dealer.of_size(gpu, work.batch, size, work.activations)
            for size in (*smaller, *larger)
        ]
        for other in others:
            if other is None:
                continue
            workloads = list(now.workloads)
            for rank in alike:
                workloads[rank] = other
            shares = self._shares(workloads, now.shares, alike)
            if shares is not None:
                yield workloads, shares

    def _moved_state(
        self, now: Found, givers: Sequence[int], takers: Sequence[int]
    ) -> Iterator[tuple[list[Workload], list[Share]]]:
        least = now.shares[givers[0]].fraction * len(givers)
        for moved in _MOVED:
            if moved >= least:
                continue
            shares = list(now.shares)
            for ranks, amount in ((givers, -moved), (takers, moved)):
                for rank in ranks:
                    fraction = shares[rank].fraction + amount / len(ranks)
                    shares[rank] = replace(shares[rank], fraction=fraction)
            fitting = self._shares(now.workloads, shares, [*givers, *takers])
            if fitting is not None:
                yield list(now.workloads), fitting

    def _moved_samples(
        self, now: Found, giver: int, taker: int
    ) -> Iterator[tuple[list[Workload], list[Share]]]:
        given, taken = now.workloads[giver], now.workloads[taker]
        if given.batch <= (0 if self._problem.allow_idle else 1):
            return
        fewer = self._dealer.fastest(self._gpus[giver], given.batch - 1, given.activations)
        more = self._dealer.fastest(self._gpus[taker], taken.batch + 1, taken.activations)
        if fewer is None or more is None:
            return
        workloads = list(now.workloads)
        workloads[giver], workloads[taker] = fewer, more
        shares = self._shares(workloads, now.shares, [giver, taker])
        if shares is not None:
            yield workloads, shares
