"""A small selection of cases in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]


def pairs_of(row: Row) -> set[tuple[int, Any, int, Any]]:
    """Every pair of (position, value) that a row shows together."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def every(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination."""
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


def covering(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations that show every pair of values: the greedy choice, always the same."""
    rows = list(product(*values.values()))
    missing = set().union(*(pairs_of(row) for row in rows))
    chosen: list[dict[str, Any]] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        chosen.append(dict(zip(values, best, strict=True)))
    return chosen
