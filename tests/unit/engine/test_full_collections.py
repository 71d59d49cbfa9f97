"""When full garbage collections are made, and what is left to Python and to the user."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hytrain.engine import full_collections
from hytrain.engine.full_collections import COUNTED, EACH, SETTLED, FullCollections

KNOWN = SETTLED + COUNTED
"""The step that decides how often."""


@pytest.fixture
def middle(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """How many collections of the middle generation there were, and in which steps full ones."""
    seen = SimpleNamespace(count=0, full=[], step=0)
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    monkeypatch.setattr(full_collections, "_middle_collections", lambda: seen.count)
    monkeypatch.setattr(gc, "collect", lambda: seen.full.append(seen.step))
    yield seen
    gc.enable()
    gc.set_threshold(*before)


def made(of_others: int = 0) -> FullCollections:
    """With ranks of which another one counts as many."""

    def maximum(values: list[int], what: str) -> list[int]:
        del what
        return [max(*values, of_others)]

    ranks: Any = SimpleNamespace(maximum=maximum)
    return FullCollections(ranks)


def steps(collections: FullCollections, seen: SimpleNamespace, number: int, each: int) -> None:
    for _ in range(number):
        seen.step += 1
        seen.count += each
        collections.backward_launched()


@pytest.mark.parametrize(("each", "every"), [(1, EACH), (5, EACH // 5), (EACH, 1), (1000, 1)])
def test_as_often_as_objects_are_made(middle: SimpleNamespace, each: int, every: int) -> None:
    collections = made()
    steps(collections, middle, KNOWN, each)
    assert not middle.full
    assert gc.get_threshold() == (700, 10, 2 * EACH)
    steps(collections, middle, 200 - KNOWN, each)
    assert middle.full == [step for step in range(KNOWN + 1, 201) if step % every == 0]
    collections.close()
    assert gc.get_threshold() == (700, 10, 10)
    collections.close()


def test_the_rank_with_most_objects_decides(middle: SimpleNamespace) -> None:
    collections = made(of_others=5 * COUNTED)
    steps(collections, middle, 100, 1)
    assert middle.full == [step for step in range(KNOWN + 1, 101) if step % (EACH // 5) == 0]


def test_none_where_none_is_needed(middle: SimpleNamespace) -> None:
    collections = made()
    steps(collections, middle, 200, 0)
    collections.close()
    assert not middle.full
    assert gc.get_threshold() == (700, 10, 10)


def test_none_with_an_incremental_collector(middle: SimpleNamespace) -> None:
    gc.set_threshold(2000, 10, 0)
    collections = made()
    steps(collections, middle, 200, EACH)
    collections.close()
    assert not middle.full
    assert gc.get_threshold() == (2000, 10, 0)


def test_none_while_the_user_has_disabled_them(middle: SimpleNamespace) -> None:
    collections = made()
    steps(collections, middle, KNOWN, EACH)
    gc.disable()
    steps(collections, middle, 3, EACH)
    assert not middle.full
    gc.enable()
    steps(collections, middle, 1, EACH)
    assert middle.full == [KNOWN + 4]


@pytest.mark.parametrize("own", [(700, 10, 5000), (500, 20, 10)])
def test_thresholds_of_the_user_stay(middle: SimpleNamespace, own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    collections = made()
    steps(collections, middle, KNOWN, 1)
    assert gc.get_threshold() == (*own[:2], max(own[2], 2 * EACH))
    collections.close()
    assert gc.get_threshold() == own
    collections = made()
    steps(collections, middle, KNOWN, 1)
    gc.set_threshold(800, 10, 10)  # while the engine lives
    collections.close()
    assert gc.get_threshold() == (800, 10, 10)
