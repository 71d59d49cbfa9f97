"""A host's table with all rows and columns: the slow twin of host_table.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hytrain.tools.planner.pareto_set import Grid, ParetoSet

NEVER = -(2**40)


def held_by_samples(
    members: Sequence[ParetoSet], limit: int, grid: Grid, batch: int, host_most: int
) -> dict[int, int]:
    """The most units that are held with at least so many samples, for all that are possible."""
    lowest = [min(0, int(offer.keeps.min())) for offer in members]
    most = grid.units - sum(lowest)
    table = np.full((batch + 1, most + 1), NEVER, dtype=np.int64)
    table[0, 0] = 0
    for offer, low in zip(members, lowest, strict=True):
        result = np.full_like(table, NEVER)
        rows, columns = np.arange(batch + 1), np.arange(most + 1)
        for amount, keep, hold in zip(offer.amounts, offer.keeps - low, offer.holds, strict=True):
            above, left = np.maximum(0, rows - amount), np.maximum(0, columns - keep)
            result = np.maximum(result, table[np.ix_(above, left)] + hold)
        table = result
    capped = np.minimum(table, np.arange(most + 1) + limit + sum(lowest))
    best = np.minimum(capped, min(grid.units, host_most)).max(axis=1)
    return {row: int(held) for row, held in enumerate(best.tolist()) if held > NEVER // 2}
