"""What every possible stage costs, by its layers: tables of the same functions as a plan's cost.

Stages on GPUs of the same types in the same order cost the same wherever they are: one kind. A
table has an axis for the strategies (tensor parallel degree, state on the GPU or host), one for
the first layer and one for the layer after the last; what cannot be is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from hytrain.errors import PlanError
from hytrain.tools.hybrid import cost_model
from hytrain.tools.hybrid.problem import Floats, Problem
from hytrain.tools.hybrid.space import SizeClass


@dataclass(frozen=True)
class Link:
    """What of a stage decides the bandwidth to its neighbour, GB/s."""

    intra: float
    inter: float
    is_one_node: bool

    def bandwidth(self, other: Link, *, same_node: bool) -> float:
        """To the next stage; ``same_node``: the border between them is within a node."""
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

    @property
    def gpus(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass
class Table:
    """Strategies of a kind at one number of micro-batches."""

    strategies: list[tuple[int, int, bool]]
    """dp, tp, whether the optimizer state is in host memory."""

    time: Floats
    """(strategies, start, stop), ms; infinite where it does not fit."""

    update: Floats
    gradients: Floats
    activation: Floats
    """Bytes, (strategies, stop)."""

    fb_sync: Floats
    """(strategies,), ms of a micro-batch."""


@dataclass
class Tables:
    """Makes the tables of a problem, each once; those of one order's mixed kinds on demand."""

    problem: Problem
    _even: dict[tuple[str, int, float, int], Table] = field(default_factory=dict)

    def table(
        self, kind: Kind, cluster: cost_model.Ranks, first: int, micro_batches: int
    ) -> Table:
        """A kind's table.

        Args:
            kind: of stage.
            cluster: the ranks, in the order's order.
            first: rank of one such stage.
            micro_batches: of a step.
        """
        if len(kind.runs) > 1 or self.problem.options.host is not None:
            return by_stage(self.problem, cluster, first, kind.gpus, micro_batches)
        key = (kind.runs[0][0], kind.gpus, kind.gradients, micro_batches)
        if key not in self._even:
            self._even[key] = even_table(self.problem, *key)
        return self._even[key]


def kinds(
    problem: Problem, order: Sequence[str], size: SizeClass
) -> tuple[list[Kind], dict[tuple[int, int], int], list[int]]:
    """The kinds of stage of an order of types.

    Returns:
        The kinds; the number of the kind at (first unit, units); a first rank of each kind.
    """
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
                cost_model.bandwidth(problem, ranks),
            )
            if kind not in numbers:
                numbers[kind] = len(numbers)
                firsts.append(first)
            at[unit, shape] = numbers[kind]
    return list(numbers), at, firsts


def _link(problem: Problem, ranks: cost_model.Ranks) -> Link:
    devices = {problem.device[device] for device, _ in ranks}
    intra = min(device.intra_bandwidth for device in devices)
    if not problem.options.inter_node:
        return Link(intra, intra, is_one_node=False)
    inter = min(device.inter_bandwidth for device in devices)
    return Link(intra, inter, is_one_node=len({node for _, node in ranks}) == 1)


def _layers(problem: Problem) -> tuple[Floats, Floats, Floats]:
    """First layers (a column), layers after the last (a row), and infinity where there is none."""
    layers = np.arange(problem.num_layers + 1)
    return layers[:, None], layers[None, :], np.where(layers[:, None] < layers, 0.0, np.inf)


def by_stage(
    problem: Problem, cluster: cost_model.Ranks, first: int, gpus: int, micro_batches: int
) -> Table:
    """A table, one strategy after another: for mixed groups, and what :func:`even_table` equals."""
    start, stop, nothing = _layers(problem)
    found: list[tuple[tuple[int, int, bool], cost_model.Stage]] = []
    degrees = [1 << bit for bit in range(gpus.bit_length())]
    for tp in degrees:
        for on_host in (False, True) if problem.options.host is not None else (False,):
            strategy = (gpus // tp, tp)
            try:
                one = cost_model.stage(
                    problem, cluster, first, strategy, micro_batches, start, stop, on_host=on_host
                )
            except PlanError:
                continue
            found.append(((*strategy, on_host), one))
    shape = (0, *nothing.shape)
    if not found:
        none = np.zeros(shape)
        return Table([], none, none, none, np.zeros(shape[:2]), np.zeros(0))
    stages = [one for _, one in found]
    time = np.stack(
        [
            np.where(one.memory.demand <= one.memory.capacity, one.time, np.inf) + nothing
            for one in stages
        ]
    )
    return Table(
        [strategy for strategy, _ in found],
        time,
        np.stack([np.broadcast_to(one.update, nothing.shape) for one in stages]),
        np.stack([one.gradients for one in stages]),
        np.stack([one.activation[0] for one in stages]),
        np.array([one.fb_sync for one in stages]),
    )


def even_table(
    problem: Problem, device: str, gpus: int, bandwidth: float, micro_batches: int
) -> Table:
    """The table of equal GPUs, all strategies at once, by prefix sums."""
    start, stop, nothing = _layers(problem)
    samples, rest = divmod(problem.gbs, micro_batches)
    strategies: list[tuple[int, int, bool]] = []
    for tp in (1 << bit for bit in range(gpus.bit_length())):
        dp, share = gpus // tp, samples // (gpus // tp)
        is_dealt = rest == 0 and share * dp == samples and 0 < share <= problem.max_batch
        if is_dealt and tp <= problem.max_tp and (device, tp, share) in problem.samples:
            strategies.append((dp, tp, False))
    if not strategies:
        none = np.zeros((0, *nothing.shape))
        return Table([], none, none, none, none[:, 0], np.zeros(0))
    keys = [(device, tp, samples // dp) for dp, tp, _ in strategies]
    times = np.stack([problem.time_sums[key] for key in keys])
    memory = np.stack([problem.memory_sums[key] for key in keys])
    demand = cost_model.NOTHING_MB + problem.mem_coef * (memory[:, None, :] - memory[:, :, None])
    one = problem.device[device].memory_mb
    capacity = one if problem.options.per_gpu_memory else one * gpus
    dp, tp = (np.array([row[i] for row in strategies])[:, None, None] for i in (0, 1))
    time = times[:, None, :] - times[:, :, None] + nothing
    time[demand > capacity] = np.inf
    return Table(
        strategies,
        time,
        cost_model.update_time(problem, tp, stop - start),
        cost_model.gradient_time(problem, dp, tp, bandwidth, start, stop),
        cost_model.activation_bytes(problem, tp[:, 0], samples // dp[:, 0], stop),
        np.array([problem.samples[key].fb_sync for key in keys]),
    )
