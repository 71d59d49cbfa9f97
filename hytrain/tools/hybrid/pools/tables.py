"""A problem's cost as arrays over stages, for one micro-batch size."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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

_THRESHOLDS = 64


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
    mixed: Floats
    """[K]: 0 of a kind of one pool, else a number of its own (whose sums hardly coincide)."""
    weights: Floats
    """[W, pools], last the row whose sum over a stage bounds its time (:attr:`work`)."""
    work: Floats
    """[L+1]: sums of the least weighted GPU seconds of each layer."""
    onward: Floats
    """[L]: the least of :attr:`link` over the kinds."""
    thresholds: Floats
    """[G], rising: seconds of a stage."""

    @cached_property
    def needs(self) -> Floats:
        """[G, L+1, L+1, W]: with all stages within a threshold, what so many stages from a layer on
        use at least, of one replica each; none of them the pipeline's first."""
        return _needs(self.compute, self.depth, self.usage, self.onward, self.thresholds)


def size_tables(
    problem: Problem, micro_batch: int, most_pools: int | None = None
) -> SizeTables | None:
    """None where no kind (of so many pools at most) is profiled at this size."""
    kinds = kinds_of(problem, micro_batch, most_pools)
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
    depth = np.array([np.min([depth_of[end] for end in kind], axis=0) for kind in kinds])
    link = _links(problem, kinds, ends, micro_batch)
    return SizeTables(
        micro_batch=micro_batch,
        kinds=kinds,
        compute=compute,
        update=np.array([np.max([update_of[end] for end in kind], axis=0) for kind in kinds]),
        depth=depth,
        link=link,
        usage=usage(kinds, weights),
        mixed=np.where(
            [len(kind) > 1 for kind in kinds], np.sqrt(np.arange(len(kinds)) + 2.0), 0.0
        ),
        weights=weights,
        work=work,
        onward=link.min(axis=(1, 2)),
        thresholds=_thresholds(compute),
    )


def later_transfer(onward: Floats, left: int) -> Floats:
    """[start, stop]: the least transfers of a stage that is not the first, ``left`` to the last."""
    back = np.append(onward, np.inf)[:, None]
    return 2 * back if left == 1 else back + np.append(np.inf, onward)[None, :]


def _thresholds(compute: Floats) -> Floats:
    least = compute.min(axis=0)
    layers = least.shape[0] - 1
    low = max(least[layer, layer + 1] for layer in range(layers))
    slowest = compute[:, 0, -1]
    found = np.geomspace(low, slowest.max(), _THRESHOLDS)
    found[-1] = np.inf
    return found


def _needs(
    compute: Floats, depth: Floats, used: Floats, onward: Floats, thresholds: Floats
) -> Floats:
    layers = compute.shape[1] - 1
    needs = np.full((len(thresholds), layers + 1, layers + 1, used.shape[1]), np.inf)
    needs[:, 0, layers] = 0.0
    least = needs[:, 0]
    fitting: Any = None
    for left in range(1, layers + 1):
        fits = depth >= left
        if left <= 2 or not np.array_equal(fits, fitting):
            fitting = fits
            time = np.where(fits, compute, np.inf) + later_transfer(onward, left)
            least = _least_usage(time, used, thresholds)
        # [G, start, stop, W]; infinite where there is no layer between them.
        needs[:, left] = (least + needs[:, left - 1][:, None]).min(axis=2)
    return needs


def _least_usage(time: Floats, used: Floats, thresholds: Floats) -> Floats:
    """[G, start, stop, W]: of a replica, by the kinds within each threshold."""
    found = np.full((len(thresholds), *time.shape[1:], used.shape[1]), np.inf)
    first = np.where(np.isinf(time), len(thresholds), np.searchsorted(thresholds, time))
    for kind, at in enumerate(first):
        start, stop = np.nonzero(at < len(thresholds))
        g = at[start, stop]
        found[g, start, stop] = np.minimum(found[g, start, stop], used[kind])
    return np.minimum.accumulate(found, axis=0)


def _depth(problem: Problem, pool: int, tp: int, micro_batch: int) -> Floats:
    table = problem.memory[tp]
    model = between(_sums(table.parameters)) * problem.bytes_per_parameter
    each = between(_sums(table.activations)) * micro_batch * problem.bytes_per_activation
    left = problem.pools[pool].memory_bytes - model - problem.reserved_bytes[tp > 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(each > 0, left / each, np.where(left >= 0, np.inf, -1.0))


def _links(problem: Problem, kinds: list[Kind], ends: list[End], micro_batch: int) -> Floats:
    sizes, which = np.unique(np.array(problem.activation_bytes) * micro_batch, return_inverse=True)
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
