"""Tensors inside nested arguments: tuples, lists, mappings and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

Snapshot = list[tuple[Any, list[Any]]]
"""Containers, each with what it held."""


def map_leaves(tree: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """Returns the same structure with ``change`` of every instance of ``kind`` in its place.

    A container without one is returned as it is, and so is anything that is not a container.
    Containers are tuples (named ones too), lists, mappings and dataclass instances.
    """
    if isinstance(tree, kind):
        return change(tree)
    items = _contents(tree)
    changed = [map_leaves(item, kind, change) for item in items]
    return tree if _same(items, changed) else _with_contents(tree, changed)


def _contents(tree: Any) -> list[Any]:
    """What a container holds; [] for anything else."""
    if isinstance(tree, (tuple, list)):
        return list(cast("Sequence[Any]", tree))
    if isinstance(tree, Mapping):
        return list(cast("Mapping[Any, Any]", tree).values())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return []


def _with_contents(tree: Any, items: list[Any]) -> Any:
    """A container like ``tree`` that holds other items."""
    make: Any = type(tree)
    if isinstance(tree, tuple):
        return make(*items) if "_fields" in vars(make) else make(items)
    if isinstance(tree, list):
        return items
    if isinstance(tree, Mapping):
        named = dict(zip(cast("Mapping[Any, Any]", tree), items, strict=True))
        # The outputs of transformers are mappings and dataclasses at once, and made by name.
        return make(**named) if dataclasses.is_dataclass(tree) else make(named)
    made = copy.copy(tree)
    for field, item in zip(dataclasses.fields(tree), items, strict=True):
        object.__setattr__(made, field.name, item)  # frozen ones too
    return made


def _same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def leaves(tree: Any, kind: type[Any]) -> list[Any]:
    """Every instance of ``kind`` in the tree, in the order of :func:`map_leaves`."""
    if isinstance(tree, kind):
        return [tree]
    return [leaf for item in _contents(tree) for leaf in leaves(item, kind)]


def snapshot(tree: Any) -> Snapshot:
    """What the tree's lists and mappings hold now."""
    return [(container, _contents(container)) for container in _mutable(tree)]


def was_changed(taken: Snapshot) -> bool:
    """Whether one of the containers holds something else than when the snapshot was taken."""
    return any(not _same(before, _contents(container)) for container, before in taken)


def _mutable(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, Mapping)):
        yield tree
    for item in _contents(tree):
        yield from _mutable(item)
