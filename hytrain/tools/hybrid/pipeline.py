"""The cheapest pipeline of one order of types, size class and number of micro-batches.

Where no stage may exceed given limits of time, update and gradients, what is left of the cost is a
sum over the stages, and its least value a shortest path: backward over (unit at which a stage
starts, first layer), with the class of the next stage's bandwidth and the units that the groups
before have above one each as the rest of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hytrain.tools.hybrid.cost_model import BANDWIDTH_UNIT
from hytrain.tools.hybrid.problem import Floats, Plan, Problem
from hytrain.tools.hybrid.space import SizeClass
from hytrain.tools.hybrid.stage_tables import Tables, stage_tables

Limits = tuple[float, float, float]
"""Of every stage's time, update and gradients, ms."""

UNLIMITED: Limits = (np.inf, np.inf, np.inf)


@dataclass(frozen=True)
class Path:
    """A cheapest pipeline within limits."""

    plan: Plan
    rest: float
    """What of its cost is a sum over stages: times, activations, fb_sync of the last."""

    peaks: Limits
    """The largest time, update and gradients of its stages."""


class Pipelines:
    """All pipelines of one order of types, size class and number of micro-batches.

    Args:
        problem: to be planned.
        tables: of its stages.
        order: of device types.
        size: class of stage counts.
        micro_batches: of a step.
    """

    def __init__(
        self,
        problem: Problem,
        tables: Tables,
        order: tuple[str, ...],
        size: SizeClass,
        micro_batches: int,
    ) -> None:
        self.problem, self.order, self.size = problem, order, size
        self.micro_batches = micro_batches
        where = tables.layout(order, size)
        self._kind = where.at
        self._choices = tables.choices(where, micro_batches)
        links = sorted({kind.link for kind in where.kinds}, key=repr)
        self._link = [links.index(kind.link) for kind in where.kinds]
        self._num_links = len(links)
        rate = [
            [kind.link.bandwidth(link, same_node=kind.ends_inside) for link in links]
            for kind in where.kinds
        ]
        self._send: Floats = 1.0 / (np.array(rate) * BANDWIDTH_UNIT)
        self._costs = stage_tables(problem, self._choices)
        self._sync: Floats = self._costs.fb_sync * micro_batches

    def _within(self, limits: Limits) -> Floats:
        """Times of the stages that keep to the limits; infinite those of others."""
        if limits == UNLIMITED:
            return self._costs.time
        time, update, gradients = limits
        allowed = self._costs.time <= time
        allowed &= self._costs.update <= update
        allowed &= self._costs.gradients <= gradients
        return np.where(allowed, self._costs.time, np.inf)

    def least_peaks(self, limits: Limits) -> Limits:
        """The least that the largest time, update and gradients can be, each alone, within limits.

        Infinite where no pipeline is within them.
        """
        is_none = np.isinf(self._within(limits))
        parts = (self._costs.time, self._costs.update, self._costs.gradients)
        costs = np.stack([np.where(is_none, np.inf, part).min(axis=1) for part in parts], axis=1)
        size, layers = self.size, self.problem.num_layers
        least = np.full((size.units + 1, 3, size.excess + 1, layers + 1), np.inf)
        for unit in reversed(range(size.units)):
            for shape in size.shapes:
                kind = self._kind.get((unit, shape))
                if kind is None:
                    continue
                here = least[unit, :, : size.excess + 2 - shape]
                if unit + shape == size.units:
                    ends = self._ends(shape)
                    here[:, ends] = np.minimum(here[:, ends], costs[kind][:, None, :, layers])
                    continue
                after = least[unit + shape, :, shape - 1 :]
                peak = np.maximum(costs[kind][:, None], after[:, :, None, :]).min(axis=3)
                np.minimum(here, peak, out=here)
        time, update, gradients = least[0, :, 0, 0].tolist()
        return time, update, gradients

    def _ends(self, shape: int) -> slice:
        """The excess before a last group, where the stages are as many as they may be."""
        return slice(
            max(0, self.size.units - self.size.most - shape + 1), self.size.excess + 2 - shape
        )

    def cheapest(self, limits: Limits) -> Path | None:
        """The pipeline within limits whose sum over stages is least; None where there is none."""
        within = self._within(limits)
        send = self._costs.activation[:, :, None, :] * self._send[:, None, :, None]
        inner = (within[:, :, None] + send[:, :, :, None, :]).min(axis=1)
        last = (within[..., -1] + self._sync[:, :, None]).min(axis=1)
        least = self._least_rest(inner, last)
        if np.isinf(least[0, :, 0, 0]).all():
            return None
        return self._follow(least, inner, last, within, send)

    def _least_rest(self, inner: Floats, last: Floats) -> Floats:
        """Least rest from (unit, link of the stage there, excess before it, first layer) on."""
        size, layers = self.size, self.problem.num_layers
        least = np.full((size.units + 1, self._num_links, size.excess + 1, layers + 1), np.inf)
        for unit in reversed(range(size.units)):
            for shape in size.shapes:
                kind = self._kind.get((unit, shape))
                if kind is None:
                    continue
                here = least[unit, self._link[kind], : size.excess + 2 - shape]
                if unit + shape == size.units:
                    ends = self._ends(shape)
                    np.minimum(here[ends], last[kind], out=here[ends])
                    continue
                after = least[unit + shape, :, shape - 1 :]
                rest = (inner[kind][:, None] + after[:, :, None, :]).min(axis=(0, 3))
                np.minimum(here, rest, out=here)
        return least

    def _follow(
        self, least: Floats, inner: Floats, last: Floats, within: Floats, send: Floats
    ) -> Path:
        """The pipeline of the least rest; of equally cheap stages the smaller and earlier ones."""
        size, layers = self.size, self.problem.num_layers
        unit = excess = layer = 0
        link = int(least[0, :, 0, 0].argmin())
        rest = float(least[0, link, 0, 0])
        groups: list[int] = []
        partition = [0]
        chosen: list[tuple[int, int, int, int]] = []
        while unit < size.units:
            best = (np.inf, 0, 0, 0, 0)
            for shape in size.shapes:
                kind = self._kind.get((unit, shape))
                if kind is None or self._link[kind] != link or excess + shape - 1 > size.excess:
                    continue
                if unit + shape == size.units:
                    ends = self._ends(shape)
                    if ends.start <= excess < ends.stop and last[kind, layer] < best[0]:
                        best = (float(last[kind, layer]), shape, kind, 0, layers)
                    continue
                after = inner[kind, :, layer] + least[unit + shape, :, excess + shape - 1]
                at = int(after.argmin())
                if after.flat[at] < best[0]:
                    best = (float(after.flat[at]), shape, kind, *divmod(at, layers + 1))
            _, shape, kind, next_link, stop = best
            sent = send[kind, :, next_link, stop] if stop < layers else self._sync[kind]
            strategy = int((within[kind, :, layer, stop] + sent).argmin())
            chosen.append((kind, strategy, layer, stop))
            groups.append(shape * size.unit)
            partition.append(stop)
            unit, excess, layer, link = unit + shape, excess + shape - 1, stop, next_link
        return Path(self._plan(groups, partition, chosen), rest, self._peaks(chosen))

    def _plan(
        self, groups: list[int], partition: list[int], chosen: list[tuple[int, int, int, int]]
    ) -> Plan:
        picked = [self._choices[kind][choice] for kind, choice, _, _ in chosen]
        on_host = tuple(one.on_host for one in picked)
        return Plan(
            order=self.order,
            groups=tuple(groups),
            strategies=tuple((one.dp, one.tp) for one in picked),
            micro_batches=self.micro_batches,
            partition=tuple(partition),
            on_host=on_host if any(on_host) else (),
        )

    def _peaks(self, chosen: list[tuple[int, int, int, int]]) -> Limits:
        at: tuple[NDArray[np.int64], ...] = tuple(np.array(chosen).T)
        parts = (self._costs.time, self._costs.update, self._costs.gradients)
        time, update, gradients = (float(part[at].max()) for part in parts)
        return time, update, gradients
