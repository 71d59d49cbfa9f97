"""Tensors inside nested arguments: tuples, lists, mappings and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

Snapshot = list[tuple[Any, list[Any]]]
"""Containers, each with what it held."""


def map_leaves(tree: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """The same structure with every instance of ``kind`` replaced.

    A container without one is returned as it is, and so is whatever is no container.

    Args:
        tree: nested tuples (named ones too), lists, mappings and dataclass instances.
        kind: class of the leaves to replace.
        change: takes a leaf, gives what stands in its place.
    """
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple):
        items = cast("tuple[Any, ...]", tree)
        changed = [map_leaves(item, kind, change) for item in items]
        if _same(items, changed):
            return items
        make: Any = type(items)
        return make(*changed) if "_fields" in vars(make) else make(changed)
    if isinstance(tree, list):
        items = cast("list[Any]", tree)
        changed = [map_leaves(item, kind, change) for item in items]
        return items if _same(items, changed) else changed
    if isinstance(tree, Mapping):
        return _map_mapping(cast("Mapping[Any, Any]", tree), kind, change)
    if _is_record(tree):
        return _map_record(tree, kind, change)
    return tree


def _map_mapping(
    tree: Mapping[Any, Any], kind: type[Any], change: Callable[[Any], Any]
) -> Mapping[Any, Any]:
    changed = {key: map_leaves(item, kind, change) for key, item in tree.items()}
    if _same(tree.values(), changed.values()):
        return tree
    make: Any = type(tree)
    # The outputs of transformers are mappings and dataclasses at once, and made by name.
    return make(**changed) if dataclasses.is_dataclass(tree) else make(changed)


def _map_record(tree: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    values = _fields(tree)
    changed = {name: map_leaves(item, kind, change) for name, item in values.items()}
    if _same(values.values(), changed.values()):
        return tree
    made = copy.copy(tree)
    for name, item in changed.items():
        object.__setattr__(made, name, item)  # frozen ones too
    return made


def _is_record(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _same(before: Any, after: Any) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


def leaves(tree: Any, kind: type[Any]) -> list[Any]:
    """Every instance of ``kind`` in the tree, in the order of :func:`map_leaves`."""
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(tree, kind, keep)
    return found


def snapshot(tree: Any) -> Snapshot:
    """What the tree's lists and mappings hold now."""
    return [(container, _contents(container)) for container in _mutable(tree)]


def was_changed(taken: Snapshot) -> bool:
    """Whether one of the containers holds something else than when the snapshot was taken."""
    for container, before in taken:
        now = _contents(container)
        if len(now) != len(before) or not _same(before, now):
            return True
    return False


def _contents(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return list(cast("Mapping[Any, Any]", container).values())
    return list(container)


def _mutable(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, Mapping)):
        yield tree
        for item in _contents(tree):
            yield from _mutable(item)
    elif isinstance(tree, tuple):
        for item in cast("tuple[Any, ...]", tree):
            yield from _mutable(item)
    elif _is_record(tree):
        for item in _fields(tree).values():
            yield from _mutable(item)
