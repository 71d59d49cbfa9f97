"""Least cost of covering a demand: (min,+) sums of step functions.

Every member offers steps (amount, cost), of which it uses one; how cheaply can all together reach
a demand? A step function has few steps, so one member costs steps x demand. That is why equal
members are not summed by squaring: a power has as many steps as the demand, and squaring it costs
the demand squared (64 GPUs, batch 1024: 2 million operations one by one, 10 million by squaring).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepFunction:
    """What one member offers: each step costs more than the one before, and gives more.

    Attributes:
        amounts: ascending.
        costs: ascending.
        labels: what each step stands for, given back by :func:`cheapest`.
    """

    amounts: Ints
    costs: Floats
    labels: Ints

    @staticmethod
    def pareto(amounts: Ints, costs: Floats) -> StepFunction:
        """The steps that no other beats; labels are positions in what was given."""
        order = np.lexsort((-amounts, costs))
        best = np.maximum.accumulate(amounts[order])
        is_new = np.concatenate([np.ones(1, dtype=np.bool_), best[1:] > best[:-1]])
        kept = order[is_new[: len(order)]]
        return StepFunction(amounts[kept], costs[kept], kept)


def least_cost(members: Sequence[StepFunction], demand: int) -> float:
    """The least cost of reaching the demand; infinite where they cannot."""
    return float(least_costs(members, demand)[demand])


def least_costs(members: Sequence[StepFunction], demand: int) -> Floats:
    """The least cost of reaching each demand 0..demand."""
    cost = _nothing(demand)
    for steps in members:
        if not len(steps.amounts):
            return np.full(demand + 1, np.inf)
        cost = _candidates(cost, steps, demand).min(axis=0)
    return cost


def cheapest(members: Sequence[StepFunction], demand: int) -> list[int]:
    """The label of the step that each member uses where the cost is least.

    The demand must be within reach. The back-pointers of all members are kept: members x demand.
    """
    cost = _nothing(demand)
    choices: list[Ints] = []
    for steps in members:
        candidates = _candidates(cost, steps, demand)
        choices.append(candidates.argmin(axis=0))
        cost = candidates.min(axis=0)
    assert np.isfinite(cost[demand]), "the demand is out of reach"
    labels: list[int] = []
    left = demand
    for steps, choice in zip(reversed(members), reversed(choices), strict=True):
        step = int(choice[left])
        labels.append(int(steps.labels[step]))
        left = max(0, left - int(steps.amounts[step]))
    return labels[::-1]


def _nothing(demand: int) -> Floats:
    """What no member at all can do: cover nothing."""
    cost = np.full(demand + 1, np.inf)
    cost[0] = 0.0
    return cost


def _candidates(cost: Floats, steps: StepFunction, demand: int) -> Floats:
    """Cost of each demand 0..demand, with each step: a row a step."""
    widest = int(min(steps.amounts[-1], demand))
    padded = np.concatenate([np.full(widest, cost[0]), cost])
    windows = np.lib.stride_tricks.sliding_window_view(padded, demand + 1)
    return windows[widest - np.minimum(steps.amounts, demand)] + steps.costs[:, None]
