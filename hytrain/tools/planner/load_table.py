"""Loads that a rank can choose from, as columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hytrain.formats.policies import Activations
from hytrain.tools.planner.cost_model import Columns, Load
from hytrain.tools.planner.min_plus import Floats, Ints

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Growth:
    """How compute grows as a last micro-batch does, with all else equal.

    Attributes:
        seconds: more than with 1 sample, of 1, 2, 3, ...; ascending.
    """

    seconds: Floats

    def more(self, slack: float) -> int:
        """Samples besides the first one that so many seconds suffice for."""
        found = np.searchsorted(self.seconds, slack * (1.0 + _ROUNDING), side="right")
        return max(0, int(found) - 1)


@dataclass(frozen=True, slots=True)
class LoadTable:
    """Some loads of a rank, in the order of candidate_loads.py.

    Attributes:
        loads: as they would be carried out.
        amounts: samples that each computes.
        fewest: as few as the same micro-batches allow.
        single: which loads are one micro-batch.
        inner: their numbers.
        outer: their numbers with the fewest samples.
        growth: for each policy, which loads have it, and how they grow.
    """

    loads: tuple[Load, ...]
    amounts: Ints
    fewest: Ints
    single: npt.NDArray[np.bool_]
    inner: Columns
    outer: Columns
    growth: tuple[tuple[npt.NDArray[np.bool_], Growth], ...]

    @staticmethod
    def of(
        inner: Sequence[Load], outer: Sequence[Load], growth: Mapping[Activations, Growth]
    ) -> LoadTable:
        """Loads as they would be carried out, and each with the fewest samples."""
        policies = np.array([work.activations for work in inner])
        return LoadTable(
            loads=tuple(inner),
            amounts=np.array([work.batch for work in inner], dtype=np.intp),
            fewest=np.array([work.batch for work in outer], dtype=np.intp),
            single=np.array([work.microbatch == work.batch for work in outer], dtype=np.bool_),
            inner=Columns.of(inner),
            outer=Columns.of(outer),
            growth=tuple((policies == policy, one) for policy, one in growth.items()),
        )

    def samples(self, step: float, *, outer: bool) -> Ints:
        """What each load computes in a step of so many seconds; by the outer reading at least."""
        if not outer:
            return self.amounts
        most = self.fewest.copy()
        slack = step - self.outer.compute
        for has_policy, growth in self.growth:
            allowed = slack[has_policy] * (1.0 + _ROUNDING)
            more = np.searchsorted(growth.seconds, allowed, side="right")
            most[has_policy] += np.maximum(0, more - 1)
        # A single one's growth may hide behind what its forward waits for.
        return np.where(self.single, self.amounts, np.minimum(most, self.amounts))
