"""A problem's cost as arrays over stages: for one micro-batch size, and for one number of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hytrain.tools.hybrid.pools.cost import (
    MOST_SPLIT,
    curve_between,
    reduce_seconds,
    seconds_of_bytes,
)
from hytrain.tools.hybrid.pools.kinds import Kind, kinds_of, usage, weights_of
from hytrain.tools.hybrid.pools.problem import End, Floats, Problem

Ints = np.ndarray[Any, np.dtype[np.int64]]


def _sums(values: Any) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])


def between(sums: Floats) -> Floats:
    """[start, stop] -> what lies between, of sums below each layer."""
    return sums[None, :] - sums[:, None]


@dataclass(frozen=True)
class SizeTables:
    """Of one micro-batch size; K kinds, L layers."""

    micro_batch: int
    kinds: list[Kind]
    compute: Floats
    """[K, L+1, L+1] by start and stop; infinite where there is no layer."""
    update: Floats
    """[K, L] by start."""
    depth: Floats
    """[K, L+1, L+1]: with how many stages from this one to the last its memory suffices."""
    link: Floats
    """[L, K, K]: seconds of layer's activations from a kind to another; at least, of mixed ones."""
    usage: Floats
    """[K, W] of one replica."""
    weights: Floats
    """[W, pools], last the row whose sum over a stage bounds its time (:attr:`work`)."""
    work: Floats
    """[L+1]: sums of the least weighted GPU seconds of each layer."""


def size_tables(problem: Problem, micro_batch: int) -> SizeTables | None:
    """None where no kind is profiled at this size."""
    kinds = kinds_of(problem, micro_batch)
    if not kinds:
        return None
    ends = sorted({end for kind in kinds for end in kind})
    layers = problem.num_layers
    empty = np.tri(layers + 1, dtype=bool)
    compute_of: dict[End, Floats] = {}
    update_of: dict[End, Floats] = {}
    depth_of: dict[End, Floats] = {}
    for pool, tp in ends:
        times = problem.profiles[problem.pools[pool].device, tp, micro_batch]
        compute_of[pool, tp] = between(_sums(times.compute))
        update_of[pool, tp] = np.array(times.update)
        depth_of[pool, tp] = _depth(problem, pool, tp, micro_batch)
    compute = np.array([np.max([compute_of[end] for end in kind], axis=0) for kind in kinds])
    compute[:, empty] = np.inf
    weights, work = _weights(problem, ends, compute_of)
    return SizeTables(
        micro_batch=micro_batch,
        kinds=kinds,
        compute=compute,
        update=np.array([np.max([update_of[end] for end in kind], axis=0) for kind in kinds]),
        depth=np.array([np.min([depth_of[end] for end in kind], axis=0) for kind in kinds]),
        link=_links(problem, kinds, ends, micro_batch),
        usage=usage(kinds, weights),
        weights=weights,
        work=work,
    )


def _depth(problem: Problem, pool: int, tp: int, micro_batch: int) -> Floats:
    table = problem.memory[tp]
    model = between(_sums(table.parameters)) * problem.bytes_per_parameter
    each = between(_sums(table.activations)) * micro_batch * problem.bytes_per_activation
    left = problem.pools[pool].memory_bytes - model - problem.reserved_bytes[tp > 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(each > 0, left / each, np.where(left >= 0, np.inf, -1.0))


def _links(problem: Problem, kinds: list[Kind], ends: list[End], micro_batch: int) -> Floats:
    sizes, which = np.unique(
        np.array(problem.activation_bytes) * micro_batch, return_inverse=True
    )
    at = {end: index for index, end in enumerate(ends)}
    of_ends = np.array(
        [
            [seconds_of_bytes(sizes, curve_between(problem, one, other)) for other in ends]
            for one in ends
        ]
    )
    first = [at[kind[0]] for kind in kinds]
    last = [at[kind[-1]] for kind in kinds]
    # Whatever the counts, the first replica sends to the first, and the last to the last.
    of_kinds = np.maximum(of_ends[np.ix_(first, first)], of_ends[np.ix_(last, last)])
    return np.moveaxis(of_kinds, 2, 0)[which]


def _weights(
    problem: Problem, ends: list[End], compute: dict[End, Floats]
) -> tuple[Floats, Floats]:
    """The rows of :func:`weights_of` and one in GPU seconds, with the layers' least in it."""
    per_gpu = [
        1.0 / min((tp * compute[pool, tp][0, -1] for pool, tp in ends if pool == one), default=1.0)
        if any(pool == one for pool, _ in ends)
        else 0.0
        for one in range(len(problem.pools))
    ]
    layer = np.min([per_gpu[p] * tp * np.diagonal(compute[p, tp], 1) for p, tp in ends], axis=0)
    return np.vstack([weights_of(problem), per_gpu]), _sums(layer)


def reduce_table(problem: Problem, tables: SizeTables, dp: int) -> Floats:
    """[K, L+1, L+1]: all-reduce of a stage; at least, where the counts of its pools decide."""
    whole = between(_sums(problem.parameter_bytes))
    start, stop = np.nonzero(whole > 0)
    by_link: dict[tuple[int, int, int], Floats] = {}

    def seconds(one: int, other: int, split: int) -> Floats:
        key = (one, other, split)
        if key not in by_link:
            curve = curve_between(problem, (one, 1), (other, 1))
            by_link[key] = reduce_seconds(problem, whole[start, stop] / split, dp, curve)
        return by_link[key]

    found = np.zeros((len(tables.kinds), *whole.shape))
    for index, kind in enumerate(tables.kinds):
        split = min(MOST_SPLIT, *(tp for _, tp in kind))
        links = [seconds(a, b, split) for (a, _), (b, _) in pairwise(kind)]
        if dp > len(kind):
            own = [seconds(pool, pool, split) for pool, _ in kind]
            links.append(np.min(own, axis=0))
        if links:
            found[index][start, stop] = np.max(links, axis=0)
    return found
