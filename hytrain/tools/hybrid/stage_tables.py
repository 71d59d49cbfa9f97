"""What every possible stage costs, by its layers: the cost model's choices as tables.

Stages on GPUs of the same types in the same order cost the same wherever they are: one *kind*.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hytrain.errors import PlanError
from hytrain.tools.hybrid.cost_model import (
    NOTHING_MB,
    Choice,
    Ranks,
    bandwidth,
    choices,
    most_on_a_machine,
)
from hytrain.tools.hybrid.problem import Floats, Problem, exposed_ms
from hytrain.tools.hybrid.space import SizeClass


@dataclass(frozen=True)
class Link:
    """The properties of a stage that decide the bandwidth to its neighbour, GB/s."""

    intra: float
    inter: float
    is_one_node: bool

    def bandwidth(self, other: Link, *, same_node: bool) -> float:
        """Returns the bandwidth to the next stage; ``same_node``: their border is within a node."""
        if self.is_one_node and other.is_one_node and same_node:
            return min(self.intra, other.intra)
        return min(self.inter, other.inter)


@dataclass(frozen=True)
class Kind:
    """Stages that cost the same."""

    runs: tuple[tuple[str, int], ...]
    """Types of the GPUs, and how many of each, in order."""

    link: Link
    ends_inside: bool
    """Whether the next stage begins in the node where this one ends."""

    gradients: float
    """Bandwidth between its GPUs, GB/s."""

    host_gpus: int = 0
    """GPUs of the largest host that the stage is on; 0 if state stays on GPUs."""

    @property
    def gpus(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(frozen=True)
class StageTables:
    """What each choice of each kind costs: (kind, choice, first layer, layers less one)."""

    time: Floats
    """Time of a micro-batch, ms; infinite if there is no such choice, or it does not fit."""

    update: Floats
    gradients: Floats
    activation: Floats
    """Bytes that a micro-batch sends to the next stage."""

    fb_sync: Floats
    """Time of a micro-batch that belongs to no layer, ms: (kind, choice)."""


def stage_tables(problem: Problem, found: Sequence[Sequence[Choice]], longest: int) -> StageTables:
    """Returns the tables of choices by kind: all that :func:`.cost_model.stage` computes, at once.

    ``found``: the choices of each kind; ``longest``: the most layers of a stage.
    """
    layers, most = problem.num_layers, max(1, *map(len, found))
    start, length = np.arange(layers)[:, None], np.arange(1, longest + 1)
    stop = np.minimum(layers, start + length)
    flat = [(kind, i, one) for kind, group in enumerate(found) for i, one in enumerate(group)]
    shape = (len(found), most, layers + 1)
    times = _filled(shape, [(kind, i, one.times) for kind, i, one in flat])
    memory = _filled(shape, [(kind, i, one.memory) for kind, i, one in flat])
    fields = np.zeros((7, *shape[:2]))
    fields[0] = -1.0  # capacity of missing choices
    for kind, i, one in flat:
        fields[:, kind, i] = (
            one.capacity,
            one.update,
            one.gradients,
            one.fb_sync,
            one.share * problem.sequence_length,
            one.tp,
            one.on_host,
        )
    capacity, rate, gradients, sync, samples, tp, on_host = fields[..., None, None]
    time = _ranges(times, stop)
    demand = NOTHING_MB + _ranges(memory, stop)
    time[(demand > capacity) | (start + length > layers)] = np.inf
    parameters = problem.parameter_sums[stop] - problem.parameter_sums[start]
    update = rate * length + np.zeros((layers, 1))
    if on_host.any():
        known = np.where(np.isinf(time), 0.0, time)
        update = np.where(on_host > 0, exposed_ms(rate * parameters, known, length), update)
    logits = problem.vocab_size / np.maximum(1.0, tp)
    width = np.where(stop == layers - 1, logits, problem.hidden_size)
    return StageTables(time, update, gradients * parameters, samples * width, sync[..., 0, 0])


def _filled(shape: tuple[int, int, int], rows: Sequence[tuple[int, int, Floats]]) -> Floats:
    """Returns rows of unequal number as one array; a choice's last row fills those it lacks."""
    most = max((len(row) for _, _, row in rows), default=1)
    filled = np.zeros((most, *shape))
    for kind, i, row in rows:
        filled[: len(row), kind, i] = row
        filled[len(row) :, kind, i] = row[-1]
    return filled


def _ranges(sums: Floats, stop: NDArray[np.int64]) -> Floats:
    """Returns the largest row's sum from each layer to before ``stop``: (..., layers, lengths)."""
    longest = sums[0][..., stop] - sums[0][..., :-1, None]
    for row in sums[1:]:
        np.maximum(longest, row[..., stop] - row[..., :-1, None], out=longest)
    return longest


@dataclass(frozen=True)
class Layout:
    """The possible stages of one order of types and size class."""

    order: tuple[str, ...]
    size: SizeClass
    cluster: Ranks
    kinds: list[Kind]
    firsts: list[int]
    """The first rank of one stage of each kind."""

    at: dict[tuple[int, int], int]
    """Number of the kind of the stage at (first unit, units)."""


def layout(problem: Problem, order: tuple[str, ...], size: SizeClass) -> Layout:
    """Returns the kinds of stage of an order of types, and where they are."""
    cluster = problem.ranks(order)
    is_linked = problem.options.inter_node
    numbers: dict[Kind, int] = {}
    at: dict[tuple[int, int], int] = {}
    firsts: list[int] = []
    for unit in range(size.units):
        for shape in size.shapes:
            first, stop = unit * size.unit, (unit + shape) * size.unit
            if unit + shape > size.units:
                break
            ranks = cluster[first:stop]
            runs = groupby(device for device, _ in ranks)
            link = _link(problem, ranks)
            ends_inside = stop < len(cluster) and cluster[stop - 1][1] == cluster[stop][1]
            kind = Kind(
                tuple((name, len(list(same))) for name, same in runs),
                link,
                is_linked and ends_inside,
                bandwidth(problem, ranks),
                most_on_a_machine(problem, ranks) if problem.options.host is not None else 0,
            )
            if kind not in numbers:
                numbers[kind] = len(numbers)
                firsts.append(first)
            at[unit, shape] = numbers[kind]
    return Layout(order, size, cluster, list(numbers), firsts, at)


def _link(problem: Problem, ranks: Ranks) -> Link:
    devices = {problem.device[device] for device, _ in ranks}
    intra = min(device.intra_bandwidth for device in devices)
    if not problem.options.inter_node:
        return Link(intra, intra, is_one_node=False)
    inter = min(device.inter_bandwidth for device in devices)
    return Link(intra, inter, is_one_node=len({node for _, node in ranks}) == 1)


class Tables:
    """The layouts of a problem and the choices of its stages, each made once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._layouts: dict[tuple[tuple[str, ...], SizeClass], Layout] = {}
        self._choices: dict[tuple[object, ...], list[Choice]] = {}

    def layout(self, order: tuple[str, ...], size: SizeClass) -> Layout:
        """See :func:`layout`."""
        if (order, size) not in self._layouts:
            self._layouts[order, size] = layout(self._problem, order, size)
        return self._layouts[order, size]

    def choices(self, where: Layout, micro_batches: int) -> list[list[Choice]]:
        """Returns the choices of each kind of stage, by ascending tensor parallel degree."""
        return [
            self._choices_of(where, kind, first, micro_batches)
            for kind, first in zip(where.kinds, where.firsts, strict=True)
        ]

    def _choices_of(
        self, where: Layout, kind: Kind, first: int, micro_batches: int
    ) -> list[Choice]:
        # The published memory of a mixed group depends on all of the cluster.
        key = (where.order if len(kind.runs) > 1 else (), kind, micro_batches)
        if key not in self._choices:
            self._choices[key] = found = []
            for tp in (1 << bit for bit in range(kind.gpus.bit_length())):
                strategy = (kind.gpus // tp, tp)
                with suppress(PlanError):
                    found += choices(self._problem, where.cluster, first, strategy, micro_batches)
        return self._choices[key]
