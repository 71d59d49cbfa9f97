"""Small selections of cases in which every pair of values occurs, or every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairs_of(row: Row) -> set[tuple[int, Any, int, Any]]:
    """Returns all pairs of (position, value) that occur together in a row."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def every(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns all combinations of values."""
    return [dict(zip(values, row, strict=True)) for row in product(*values.values())]


def covering(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns few combinations that contain every pair of values: a deterministic greedy choice."""
    rows = list(product(*values.values()))
    missing = set().union(*(pairs_of(row) for row in rows))
    chosen: list[dict[str, Any]] = []
    while missing:
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        chosen.append(dict(zip(values, best, strict=True)))
    return chosen


def everyday(values: Mapping[str, Sequence[Any]], *, pairs: bool = True, **more: Any) -> Any:
    """Parametrizes a test by every combination; everyday runs have a selection of them.

    Args:
        values: each parameter's values.
        pairs: the selection has every pair of values; False: every value.
        more: see ``pytest.mark.parametrize``.
    """
    most = max(len(each) for each in values.values())
    some = [tuple(each[n % len(each)] for each in values.values()) for n in range(most)]
    if pairs:
        some = [tuple(row.values()) for row in covering(values)]
    rows = list(product(*values.values()))
    others = [pytest.param(*r, marks=pytest.mark.parity_full) for r in rows if r not in some]
    return pytest.mark.parametrize(tuple(values), [*some, *others], **more)
