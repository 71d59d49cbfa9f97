"""A plan made better by the finer model of planned_step.py: state, layers and samples moved.

The search (plan.py) goes by lines: a rank's CPU has the whole step but for an edge, whenever its
gradients come. Many plans are equally good so, which are not when their steps are walked through:
where every step is clipped, a layer that the CPU updates late is waited for. So from a plan small
changes are tried, and the best of each round is taken while the walked step becomes shorter:

- state from one rank's shard to another's, each keeping as many layers on its GPU as have room;
- fewer or more layers of a shard on the GPU;
- a sample from one rank to another, each with its fastest micro-batch;
- another policy for a rank's activations, or other micro-batches, which leave more room.

Equal ranks (the same GPU, work and share, on equal hosts) change together, but for samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cost_model import (
    Collectives,
    Load,
    gpu_layers_that_fit,
    host_bytes,
    load,
)
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Found, line_step, parts
from hytrain.tools.planner.search import Dealer

_MOVED = (0.16, 0.04, 0.01)
"""Of the model's state, from one kind of ranks to another."""
_LAYERS = (-4, -1, 1, 4)
_SIZES = 4
"""Of micro-batches on either side of what a rank has."""
_GAIN = 1e-3
"""A change that gains less of the step is none."""
_MOST_TRIES = 600
"""Changes that are walked through, in all rounds."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What all ranks do, and the step that it takes."""

    loads: tuple[Load, ...]
    shares: tuple[Share, ...]
    seconds: float


def local_search(problem: PlanProblem, found: Found) -> Found:
    """The plan, or one whose steps are shorter by the finer model.

    Args:
        problem: what is dealt.
        found: a plan for it; even shards stay even (see :func:`unevenly`).
    """
    return _Refinement(problem, found).run()


def unevenly(problem: PlanProblem, found: Found) -> Found:
    """A plan with even shards as one whose shards need not be: its collectives take longer."""
    collectives = Collectives.of(problem, even=False)
    loads = tuple(
        load(problem, gpu, collectives, work.batch, work.microbatch, work.activations)
        for (_, gpu), work in zip(problem.cluster.ranks, found.loads, strict=True)
    )
    return Found(loads, found.shares, line_step(problem, loads, found.shares), even=False)


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
        """See :func:`refine`."""
        now = self._walked(self._found.loads, self._found.shares)
        if now is None:
            return self._found
        first = now
        while True:
            best = min(self._round(now), key=lambda work: work.seconds, default=now)
            if best.seconds >= now.seconds * (1.0 - _GAIN):
                break
            now = best
        if now is first:
            return self._found
        step = line_step(self._problem, now.loads, now.shares)
        return Found(now.loads, now.shares, step, self._even)

    def _round(self, now: _Work) -> Iterator[_Work]:
        for loads, shares in self._changes(now):
            if self._tries >= _MOST_TRIES:
                return
            walked = self._walked(loads, shares)
            if walked is not None:
                yield walked

    def _walked(self, loads: Sequence[Load], shares: Sequence[Share]) -> _Work | None:
        """None where it has no room."""
        problem = self._problem
        first = 0
        for host in problem.cluster.hosts:
            held = 0.0
            for rank in range(first, first + len(host.gpus)):
                on_gpu, on_cpu = parts(problem, shares[rank])
                held += host_bytes(problem, loads[rank], on_gpu, on_cpu)
            first += len(host.gpus)
            if held > host.memory_bytes:
                return None
        self._tries += 1
        least = line_step(problem, loads, shares)
        walked = PlannedStep(problem, loads, shares, even=self._even).seconds()
        return _Work(tuple(loads), tuple(shares), max(least, walked))

    def _changes(self, now: _Work) -> Iterator[tuple[list[Load], list[Share]]]:
        kinds: dict[object, list[int]] = {}
        rows = zip(self._hosts, self._gpus, now.loads, now.shares, strict=True)
        for rank, kind in enumerate(rows):
            kinds.setdefault(kind, []).append(rank)
        members = list(kinds.values())
        for alike in members:
            yield from self._other_layers(now, alike)
            yield from self._other_work(now, alike)
        for one, other in itertools.permutations(members, 2):
            if not self._even:
                yield from self._moved_state(now, one, other)
            yield from self._moved_samples(now, one[0], other[0])

    def _shares(
        self, loads: Sequence[Load], shares: Sequence[Share], changed: Sequence[int]
    ) -> list[Share] | None:
        """The shares with as many GPU layers of the changed ones as have room; None: not even 0."""
        fitting = list(shares)
        for rank in changed:
            shard = shares[rank].fraction * self._problem.model.parameters
            layers = gpu_layers_that_fit(self._problem, loads[rank], shard)
            if layers < 0:
                return None
            fitting[rank] = replace(shares[rank], gpu_layers=layers)
        return fitting

    def _other_layers(
        self, now: _Work, alike: Sequence[int]
    ) -> Iterator[tuple[list[Load], list[Share]]]:
        loads, first = list(now.loads), alike[0]
        most = self._shares(loads, now.shares, alike[:1])
        if most is None:
            return
        for more in _LAYERS:
            layers = min(now.shares[first].gpu_layers + more, most[first].gpu_layers)
            if layers < 0 or layers == now.shares[first].gpu_layers:
                continue
            shares = list(now.shares)
            for rank in alike:
                shares[rank] = replace(shares[rank], gpu_layers=layers)
            yield loads, shares

    def _other_work(
        self, now: _Work, alike: Sequence[int]
    ) -> Iterator[tuple[list[Load], list[Share]]]:
        work, gpu = now.loads[alike[0]], self._gpus[alike[0]]
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
            loads = list(now.loads)
            for rank in alike:
                loads[rank] = other
            shares = self._shares(loads, now.shares, alike)
            if shares is not None:
                yield loads, shares

    def _moved_state(
        self, now: _Work, givers: Sequence[int], takers: Sequence[int]
    ) -> Iterator[tuple[list[Load], list[Share]]]:
        least = now.shares[givers[0]].fraction * len(givers)
        for moved in _MOVED:
            if moved >= least:
                continue
            shares = list(now.shares)
            for ranks, amount in ((givers, -moved), (takers, moved)):
                for rank in ranks:
                    fraction = shares[rank].fraction + amount / len(ranks)
                    shares[rank] = replace(shares[rank], fraction=fraction)
            fitting = self._shares(now.loads, shares, [*givers, *takers])
            if fitting is not None:
                yield list(now.loads), fitting

    def _moved_samples(
        self, now: _Work, giver: int, taker: int
    ) -> Iterator[tuple[list[Load], list[Share]]]:
        given, taken = now.loads[giver], now.loads[taker]
        if given.batch <= (0 if self._problem.allow_idle else 1):
            return
        fewer = self._dealer.fastest(self._gpus[giver], given.batch - 1, given.activations)
        more = self._dealer.fastest(self._gpus[taker], taken.batch + 1, taken.activations)
        if fewer is None or more is None:
            return
        loads = list(now.loads)
        loads[giver], loads[taker] = fewer, more
        shares = self._shares(loads, now.shares, [giver, taker])
        if shares is not None:
            yield loads, shares
