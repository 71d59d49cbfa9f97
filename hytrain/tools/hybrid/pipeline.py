"""The cheapest pipeline of one order of types, size class and number of micro-batches.

If no stage may exceed given limits of time, update and gradients, the rest of the cost is a sum
over the stages, and its least value a shortest path. It is computed backward over states of (unit
at which a stage starts, its link, excess: units that the groups before have beyond one each, its
first layer).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hytrain.tools.hybrid.cost_model import BANDWIDTH_UNIT
from hytrain.tools.hybrid.problem import Floats, Plan, Problem
from hytrain.tools.hybrid.space import SizeClass
from hytrain.tools.hybrid.stage_tables import Tables, stage_tables

Limits = tuple[float, float, float]
"""Limits of every stage's time, update and gradients, ms."""

UNLIMITED: Limits = (np.inf, np.inf, np.inf)


@dataclass(frozen=True)
class Path:
    """A cheapest pipeline within limits."""

    plan: Plan
    rest: float
    """The part of its cost that is a sum over stages: times, activations, fb_sync of the last."""

    peaks: Limits
    """The largest time, update and gradients of its stages."""


class Pipelines:
    """All pipelines of one order of types, size class and number of micro-batches."""

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
        self._costs = stage_tables(problem, self._choices, problem.num_layers + 1 - size.fewest)
        self._sync: Floats = self._costs.fb_sync * micro_batches

    def _within(self, limits: Limits) -> Floats:
        """Returns the times of the stages that keep to the limits; others are infinite.

        The last axis ends with the longest stage, in layers, that keeps to them.
        """
        time, update, gradients = limits
        allowed = self._costs.time <= time
        allowed &= self._costs.update <= update
        allowed &= self._costs.gradients <= gradients
        within = np.where(allowed, self._costs.time, np.inf)
        lengths = np.flatnonzero(np.isfinite(within).any(axis=(0, 1, 2)))
        return within[..., : int(lengths[-1]) + 1 if len(lengths) else 1]

    def least_peaks(self, limits: Limits) -> Limits:
        """Returns the least peaks of time, update and gradients, each alone, within limits.

        Infinite if no pipeline is within them.
        """
        within = self._within(limits)
        lengths, is_none = within.shape[-1], np.isinf(within)
        parts = (within, self._costs.update, self._costs.gradients)
        costs = np.stack(
            [np.where(is_none, np.inf, part[..., :lengths]).min(axis=1) for part in parts], axis=1
        )
        last = _to_the_end(costs)
        least, after = self._empty(3, lengths)
        for unit, shape, kind in self._steps():
            here = least[unit, :, : self.size.excess + 2 - shape]
            if unit + shape == self.size.units:
                ends = self._ends(shape)
                here[:, ends, :-lengths] = np.minimum(here[:, ends, :-lengths], last[kind][:, None])
                continue
            rows = self._rows(unit)
            then = after[unit + shape, :, shape - 1 :, rows]
            peak = np.maximum(costs[kind][:, None, rows], then).min(axis=3)
            np.minimum(here[..., rows], peak, out=here[..., rows])
        time, update, gradients = least[0, :, 0, 0].tolist()
        return time, update, gradients

    def _empty(self, parts: int, lengths: int) -> tuple[Floats, Floats]:
        """Returns a table of the rest from (unit, part, excess before it, layer) on, all infinite.

        And a view of it as the rest after a stage: (..., first layer, layers - 1).
        """
        size, layers = self.size, self.problem.num_layers
        least = np.full((size.units, parts, size.excess + 1, layers + lengths), np.inf)
        return least, sliding_window_view(least[..., 1:], lengths, axis=-1)

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        """Yields (unit, units of a stage that starts there, its kind), last unit first."""
        for unit in reversed(range(self.size.units)):
            for shape in self.size.shapes:
                if (unit, shape) in self._kind:
                    yield unit, shape, self._kind[unit, shape]

    def _rows(self, unit: int) -> slice:
        """Returns the possible first layers of a stage that starts there and is not the last."""
        stages_before = max(0, unit - self.size.excess)
        stages_from = max(2, self.size.fewest - unit)
        return slice(stages_before, self.problem.num_layers - stages_from + 1)

    def _ends(self, shape: int) -> slice:
        """Returns the excess before a last group with which the stages are not too many."""
        return slice(
            max(0, self.size.units - self.size.most - shape + 1), self.size.excess + 2 - shape
        )

    def cheapest(self, limits: Limits) -> Path | None:
        """Returns the pipeline within limits with the least sum over stages; None if none is."""
        within = self._within(limits)
        send = self._costs.activation[..., : within.shape[-1]]
        inner = np.stack(
            [(within + send * rate[:, None, None, None]).min(axis=1) for rate in self._send.T],
            axis=1,
        )
        last = _to_the_end(within)
        last = (last + self._sync[:, :, None]).min(axis=1)
        least = self._least_rest(inner, last)
        if np.isinf(least[0, :, 0, 0]).all():
            return None
        return self._follow(least, inner, last, within)

    def _least_rest(self, inner: Floats, last: Floats) -> Floats:
        """Returns the least rest from (unit, link of the stage there, excess, first layer) on."""
        lengths = inner.shape[-1]
        least, after = self._empty(self._num_links, lengths)
        for unit, shape, kind in self._steps():
            here = least[unit, self._link[kind], : self.size.excess + 2 - shape]
            if unit + shape == self.size.units:
                ends = self._ends(shape)
                here[ends, :-lengths] = np.minimum(here[ends, :-lengths], last[kind])
                continue
            rows = self._rows(unit)
            then = after[unit + shape, :, shape - 1 :, rows]
            rest = (inner[kind][:, None, rows] + then).min(axis=(0, 3))
            np.minimum(here[..., rows], rest, out=here[..., rows])
        return least

    def _follow(self, least: Floats, inner: Floats, last: Floats, within: Floats) -> Path:
        """Returns the pipeline of the least rest, with the smaller and earlier of equal stages."""
        size, layers, lengths = self.size, self.problem.num_layers, inner.shape[-1]
        unit = excess = layer = 0
        link = int(least[0, :, 0, 0].argmin())
        rest = float(least[0, link, 0, 0])
        groups: list[int] = []
        chosen: list[tuple[int, int, int, int]] = []
        while unit < size.units:
            best = (np.inf, 0, 0, 0, 0)
            for shape in size.shapes:
                kind = self._kind.get((unit, shape), -1)
                if kind < 0 or self._link[kind] != link or excess + shape - 1 > size.excess:
                    continue
                if unit + shape == size.units:
                    ends = self._ends(shape)
                    if ends.start <= excess < ends.stop and last[kind, layer] < best[0]:
                        best = (float(last[kind, layer]), shape, kind, 0, layers - layer)
                    continue
                after = least[unit + shape, :, excess + shape - 1, layer + 1 : layer + lengths + 1]
                whole = inner[kind, :, layer] + after
                at = int(whole.argmin())
                if whole.flat[at] < best[0]:
                    next_link, length = divmod(at, lengths)
                    best = (float(whole.flat[at]), shape, kind, next_link, length + 1)
            _, shape, kind, next_link, length = best
            at_end = layer + length == layers
            sent = self._costs.activation[kind, :, layer, length - 1] * self._send[kind, next_link]
            more = self._sync[kind] if at_end else sent
            choice = int((within[kind, :, layer, length - 1] + more).argmin())
            chosen.append((kind, choice, layer, length - 1))
            groups.append(shape * size.unit)
            unit, excess, layer, link = unit + shape, excess + shape - 1, layer + length, next_link
        return Path(self._plan(groups, chosen), rest, self._peaks(chosen))

    def _plan(self, groups: list[int], chosen: list[tuple[int, int, int, int]]) -> Plan:
        picked = [self._choices[kind][choice] for kind, choice, _, _ in chosen]
        on_host = tuple(one.on_host for one in picked)
        return Plan(
            order=self.order,
            groups=tuple(groups),
            strategies=tuple((one.dp, one.tp) for one in picked),
            micro_batches=self.micro_batches,
            partition=(*(layer for _, _, layer, _ in chosen), self.problem.num_layers),
            on_host=on_host if any(on_host) else (),
        )

    def _peaks(self, chosen: list[tuple[int, int, int, int]]) -> Limits:
        at: tuple[NDArray[np.int64], ...] = tuple(np.array(chosen).T)
        parts = (self._costs.time, self._costs.update, self._costs.gradients)
        time, update, gradients = (float(part[at].max()) for part in parts)
        return time, update, gradients


def _to_the_end(table: Floats) -> Floats:
    """Returns the stages with the last layer, of a table by (..., first layer, layers - 1)."""
    layers, lengths = table.shape[-2:]
    last = np.full(table.shape[:-1], np.inf)
    first = np.arange(max(0, layers - lengths), layers)
    last[..., first] = table[..., first, layers - 1 - first]
    return last
