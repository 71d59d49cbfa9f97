"""Labels: pipelines begun, and which of them need not be followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hytrain.tools.hybrid.pools.problem import Bools, Floats, Ints

NO_MORE = 1e-9
"""Seconds or GPUs that rounding may make of nothing."""

_FRONT_ROWS = 512
"""Labels compared with all others at a time."""

_PORTION = 512
"""Labels extended at a time."""


@dataclass
class Labels:
    """Pipelines begun, an entry of every array each."""

    stop: Ints
    kind: Ints
    total: Floats
    """Seconds of the stages before the last."""
    slowest: Floats
    last: Floats
    """Of the last stage, without its transfer onward."""
    update: Floats
    reduce: Floats
    used: Floats
    """[labels, W]: GPUs, at least."""
    mixed: Floats
    """Of the kinds of several pools that it has; equal for equal ones."""
    parent: Ints
    bound: Floats
    floor: Floats
    """What the slowest stage of every completion takes at least."""

    def take(self, which: Ints) -> Labels:
        return Labels(**{name: value[which] for name, value in vars(self).items()})


def most_promising(labels: Labels, count: int) -> Labels:
    """So many for each layer that they end with: those that end late have more to pay still."""
    order = np.lexsort((labels.bound, labels.stop))
    _, begin = np.unique(labels.stop[order], return_index=True)
    rank = np.arange(len(order)) - np.repeat(begin, np.diff(np.append(begin, len(order))))
    return labels.take(np.sort(order[rank < count]))


def portions(labels: Labels) -> Iterator[Ints]:
    """Indices of labels, not too many at a time, of which most stop at the same layer."""
    order = np.argsort(labels.stop, kind="stable")
    for begin in range(0, len(order), _PORTION):
        yield order[begin : begin + _PORTION]


def undominated(labels: Labels, kinds: int, repeats: int, check_time: Callable[[], None]) -> Labels:
    """Without those whose every completion costs at least as much as the same one of another label.

    The other must end with the same kind and layer, and leave as many GPUs. Kinds of several pools
    use GPUs by counts still open, so it must have none, or the same.

    Args:
        labels: to be compared.
        kinds: how many there are.
        repeats: of the slowest stage: micro-batches but one.
        check_time: called now and then; what it raises ends the comparison.
    """
    groups = labels.stop * kinds + labels.kind
    order = np.lexsort((labels.total + labels.last, groups))
    edges = np.nonzero(np.diff(groups[order]))[0] + 1
    begins, ends = np.append(0, edges), np.append(edges, len(order))
    alone = ends - begins == 1
    keep = [order[begins[alone]]] if len(order) else []
    for begin, end in zip(begins[~alone], ends[~alone], strict=True):
        group = order[begin:end]
        if len(group):
            keep.append(group[_front(labels.take(group), repeats, check_time)])
    return labels.take(np.sort(np.concatenate(keep)) if keep else order)


def _front(labels: Labels, repeats: int, check_time: Callable[[], None]) -> Bools:
    """Whether none before it dominates each label; they come in rising order of their seconds."""
    count = len(labels.stop)
    total = labels.total + labels.last
    floor = np.maximum(labels.slowest, labels.floor)
    dominated = np.zeros(count, dtype=bool)
    for begin in range(0, count, _FRONT_ROWS):
        # Arrays are [dominating, dominated].
        check_time()
        these = slice(begin, begin + _FRONT_ROWS)
        before = np.arange(count)[:, None] < np.arange(count)[None, these]

        def more(values: Floats, other: Floats, these: slice = these) -> Floats:
            return np.maximum(values[:, None] - other[None, these], 0)

        slower = np.maximum(more(labels.slowest, floor), more(labels.last, labels.last))
        cost = total[:, None] - total[None, these] + repeats * slower
        cost += more(labels.update, labels.update) + more(labels.reduce, labels.reduce)
        mixed = labels.mixed
        known = (mixed[:, None] == 0) | (mixed[:, None] == mixed[None, these])
        found = before & known & (cost <= NO_MORE)
        rows, columns = np.nonzero(found)
        less = np.all(labels.used[rows] <= labels.used[these][columns] + NO_MORE, axis=1)
        dominated[begin + columns[less]] = True
    return ~dominated
