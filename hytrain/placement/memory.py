"""The memory budget: which numbers of GPU layers fit, on one rank. Bytes in, bytes out.

A layer's optimizer state (fp32 master weights and two moments: 12 bytes a parameter, 8 or 6 where
moments are kept in fewer, 2 less where master weights are split, on the CPU those of as few layers
as memory asks for) is on the GPU or on the host. On either side its gradient waits for the step's
outcome as well: on the GPU for the update, on the host, pinned, for the commit. Where updates are
committed directly it waits for neither: on the GPU those of two launches are there at one time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hytrain.errors import MemoryBudgetError, PlacementError, size_text
from hytrain.formats.moment_kinds import (
    FP32,
    MASTER_BYTES,
    MOMENTS,
    SPLIT,
    SPLIT_BYTES,
    MasterName,
)
from hytrain.offload.update_groups import IN_FLIGHT, LIMITS
from hytrain.placement.costs import LayerBytes, MemoryLimits

GPU_RESERVE_KEY = "hytrain.solver.gpu_memory_reserve_bytes"
HOST_RESERVE_KEY = "hytrain.solver.host_memory_reserve_bytes"
STREAMED = 'ZeRO stage 3 with "offload_param": {"device": "cpu"}'

GPU_RESERVE_SHARE = 0.04
HOST_RESERVE_SHARE = 0.03
LEAST_RESERVE = 1024**3
"""Bytes that stay free where the user gives no number: a share of what there is, but no less."""

_GPU_LIMIT, _GPU_RESERVE = "GPU: there is", "GPU: kept in reserve"
_GPU_BASE = "GPU: weights, known activations and gradients"
_GPU_MISSING, _HOST_MISSING = "GPU: missing", "host: missing"
_GIB = 1024**3
# More times as many ranks as now are no advice.
_MOST_TIMES_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers of GPU layers that fit.

    Attributes:
        num_layers: L.
        min_gpu_layers: the fewest with which the rest fits on the host; L + 1 where the host
            cannot even hold what is needed with none.
        max_gpu_layers: the most that fit on the GPU; -1 where it cannot hold the model alone.
    """

    num_layers: int
    min_gpu_layers: int
    max_gpu_layers: int

    @property
    def fits(self) -> bool:
        """Whether any number fits."""
        return self.min_gpu_layers <= self.max_gpu_layers

    def allow(self, gpu_layers: int) -> bool:
        """Whether this number fits."""
        return self.min_gpu_layers <= gpu_layers <= self.max_gpu_layers

    def clamp(self, gpu_layers: int) -> int:
        """The nearest number that fits.

        Raises:
            PlacementError: none fits.
        """
        if not self.fits:
            raise PlacementError(
                f"no number of GPU layers fits: the host has room only if at least "
                f"{self.min_gpu_layers} are on the GPU, which has room for {self.max_gpu_layers}"
            )
        return min(self.max_gpu_layers, max(self.min_gpu_layers, gpu_layers))

    @property
    def notable_layers(self) -> int:
        """A difference of so many layers counts: a tenth of them, two at least."""
        return max(2, math.ceil(0.1 * self.num_layers))


def gpu_reserve(given: int | None, total: int) -> int:
    """GPU bytes that stay free of ``total``."""
    return given if given is not None else max(LEAST_RESERVE, int(GPU_RESERVE_SHARE * total))


def host_reserve(given: int | None, total: int) -> int:
    """Host bytes that stay free of ``total``."""
    return given if given is not None else max(LEAST_RESERVE, int(HOST_RESERVE_SHARE * total))


# -- what is needed ----------------------------------------------------------------------------


def state_bytes(layers: Sequence[LayerBytes]) -> int:
    """Optimizer state of these layers on the GPU."""
    return sum(layer.state_bytes for layer in layers)


def host_state_bytes(layers: Sequence[LayerBytes]) -> int:
    """Optimizer state of these layers on the host."""
    return sum(layer.host_state_bytes for layer in layers)


def pending_bytes(layers: Sequence[LayerBytes]) -> int:
    """Gradients of these layers that wait on the host for their commit."""
    return gradient_bytes([layer for layer in updated_on_cpu(layers) if layer.keeps_pending])


def updated_on_cpu(layers: Sequence[LayerBytes]) -> list[LayerBytes]:
    """Those whose updates are the CPU's where their state is on the host."""
    return [layer for layer in layers if not layer.is_streamed]


def placed_bytes(layers: Sequence[LayerBytes], k: int) -> int:
    """Of the GPU, for state with the first ``k`` layers there: what is streamed takes some, too."""
    work = max((layer.work_bytes for layer in layers), default=0)
    return state_bytes(layers[:k]) + work + buffer_bytes(layers, k)


def buffer_bytes(layers: Sequence[LayerBytes], k: int) -> int:
    """Of these, what pieces of streamed state are copied to."""
    largest = max((layer.piece_bytes for layer in layers), default=0)
    return IN_FLIGHT * largest * any(layer.is_streamed for layer in layers[k:])


def gradient_bytes(layers: Sequence[LayerBytes]) -> int:
    """Gradients of these layers that wait on the GPU for the outcome of the step."""
    return sum(layer.parameters * layer.gradient_itemsize for layer in layers)


def waiting_bytes(layers: Sequence[LayerBytes], k: int) -> int:
    """The most bytes of gradients that wait on the GPU, with the first ``k`` layers there."""
    return max(_waiting_at(layers, k), default=0)


def most_waiting(layers: Sequence[LayerBytes]) -> int:
    """What bounds them, however many layers there are."""
    if not layers or layers[0].keeps_pending:
        return gradient_bytes(layers)
    # Small layers share a launch; gradients of one more are there until it has read them.
    largest = max(layers, key=lambda layer: layer.parameters)
    is_grouped = largest.moments == FP32 and largest.master == FP32
    together = LIMITS.most_elements if is_grouped else 0
    return 2 * max(largest.parameters, together) * largest.gradient_itemsize


def gpu_peak_bytes(layers: Sequence[LayerBytes], limits: MemoryLimits, k: int) -> int:
    """The GPU's peak with the first ``k`` layers there.

    The state, plus the largest sum, over the layers from the last to the first, of what that
    layer's backward uses and of the GPU-placed gradients that are there by its end. Where that use
    has not been measured: plus ``gpu_base`` and the most of those gradients, which do not coincide.

    Raises:
        PlacementError: ``k`` is not in 0..L, or ``gpu_base_at`` is not one number a layer.
    """
    _check(layers, limits, k)
    return placed_bytes(layers, k) + _gpu_rest_bytes(layers, limits, k)


def _gpu_rest_bytes(layers: Sequence[LayerBytes], limits: MemoryLimits, k: int) -> int:
    """The GPU's peak less the state."""
    if not limits.gpu_base_at:
        # Where gradients are kept between micro-batches, those that wait are among them.
        return limits.gpu_base + max(waiting_bytes(layers, k), limits.kept_gradients)
    # The peak of all may be no layer's backward (the loss): no gradient waits there yet.
    waiting = _waiting_at(layers, k)
    at = (base + more for base, more in zip(limits.gpu_base_at, waiting, strict=True))
    return max(limits.gpu_base, *at)


def _waiting_at(layers: Sequence[LayerBytes], k: int) -> list[int]:
    """Bytes of gradients that may wait there by the end of each layer's backward.

    Those of layers with state that is streamed do so wherever it is, until the step's end.
    """
    most, found = most_waiting(updated_on_cpu(layers[:k])), [0] * len(layers)
    come = streamed = 0
    for index in reversed(range(len(layers))):
        own = gradient_bytes([layers[index]])
        streamed += own * layers[index].is_streamed
        come += own * (index < k and not layers[index].is_streamed)
        found[index] = streamed + min(come, most)
    return found


def gradient_room(layers: Sequence[LayerBytes], limits: MemoryLimits, k: int) -> list[int] | None:
    """Elements of gradients on their way to the host that have room on the GPU beside all else.

    With the first ``k`` layers there: one number a layer, once its gradient has come. None where
    nothing bounds them, or what backward uses has not been measured.
    """
    if limits.gpu is None or not limits.gpu_base_at:
        return None
    # Two have been left room to in any case: see GradientRoom.
    free = limits.gpu - limits.gpu_reserve - placed_bytes(layers, k)
    free += 2 * max(gradient_bytes([layer]) for layer in layers)
    each = zip(layers, limits.gpu_base_at, _waiting_at(layers, k), strict=True)
    return [(free - base - waiting) // layer.gradient_itemsize for layer, base, waiting in each]


def host_bytes(layers: Sequence[LayerBytes], k: int, staging_bytes: int) -> int:
    """What the host holds with all but the first ``k`` layers there.

    ``staging_bytes``: pinned staging, taken once and kept whatever ``k`` is.

    Raises:
        PlacementError: ``k`` is not in 0..L.
    """
    _check_number(k, len(layers))
    return host_state_bytes(layers[k:]) + pending_bytes(layers[k:]) + staging_bytes


def taken_of_host(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int, k: int
) -> int:
    """What ``limits.host`` must hold with the first ``k`` layers on the GPU.

    Raises:
        PlacementError: ``k`` is not in 0..L, or ``gpu_base_at`` is not one number a layer.
    """
    taken = host_bytes(layers, k, staging_bytes) + limits.host_base
    return taken + (gpu_peak_bytes(layers, limits, k) if limits.shares_host else 0)


def _check(layers: Sequence[LayerBytes], limits: MemoryLimits, k: int) -> None:
    _check_number(k, len(layers))
    if limits.gpu_base_at and len(limits.gpu_base_at) != len(layers):
        raise PlacementError(
            f"gpu_base_at has {len(limits.gpu_base_at)} entries for {len(layers)} layers"
        )


def _check_number(k: int, num_layers: int) -> None:
    if not 0 <= k <= num_layers:
        raise PlacementError(f"{k} GPU layers: must be in 0..{num_layers}")


# -- split master weights on the host ----------------------------------------------------------


def all_split(layers: Sequence[LayerBytes]) -> tuple[LayerBytes, ...]:
    """The same layers, whose master weights are on the host as they are on the GPU."""
    return tuple(replace(layer, host_master=None) for layer in layers)


def first_late_layers(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int
) -> list[int]:
    """For 0..L GPU layers, the first layer that is split on the CPU as well; L where none is.

    Its update is late, behind backward. So master weights are whole there as far as the host has
    room, and late layers the last in forward order, which needs them last. Empty where master
    weights are not split, or updates not previewed.

    Raises:
        PlacementError: ``gpu_base_at`` is not one number a layer.
    """
    if not any(_may_be_late(layer) for layer in layers):
        return []
    until = list(accumulate((_bytes_of_whole(layer) for layer in layers), initial=0))
    limit, taken = limits.host - limits.host_reserve, _taken_if_split(layers, limits, staging_bytes)
    return [
        max(k, bisect_right(until, until[k] + limit - needed) - 1) for k, needed in enumerate(taken)
    ]


def _may_be_late(layer: LayerBytes) -> bool:
    return layer.master == SPLIT and layer.keeps_pending


def _bytes_of_whole(layer: LayerBytes) -> int:
    """By which a layer on the host takes more than a split one."""
    return (MASTER_BYTES - SPLIT_BYTES) * layer.parameters * _may_be_late(layer)


def as_kept(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int, k: int
) -> tuple[LayerBytes, ...]:
    """The layers with master weights on the host as :func:`first_late_layers` has them."""
    first = first_late_layers(layers, limits, staging_bytes)
    return tuple(
        replace(layer, host_master=FP32 if _may_be_late(layer) and index < first[k] else None)
        for index, layer in enumerate(layers)
    )


def late_layers(layers: Sequence[LayerBytes], k: int) -> int:
    """How many layers are updated late with the first ``k`` on the GPU."""
    return sum(_may_be_late(layer) and layer.host_master is None for layer in layers[k:])


# -- what fits ---------------------------------------------------------------------------------


def bounds(layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int) -> Bounds:
    """The smallest number of GPU layers that fits the host, the largest that fits the GPU.

    Whether they leave anything is :attr:`Bounds.fits`; :func:`check_fits` explains where not.

    Raises:
        PlacementError: ``gpu_base_at`` is not one number a layer.
    """
    num_layers = len(layers)
    host_limit = limits.host - limits.host_reserve
    taken = _taken_if_split(layers, limits, staging_bytes)
    fitting = [k for k, need in enumerate(taken) if need <= host_limit]
    if limits.shares_host:
        return Bounds(num_layers, *(fitting[0], fitting[-1]) if fitting else (num_layers + 1, -1))
    fewest = fitting[0] if fitting else num_layers + 1
    if limits.gpu is None:
        return Bounds(num_layers, fewest, num_layers)
    gpu_limit = limits.gpu - limits.gpu_reserve
    most = num_layers
    while most >= 0 and gpu_peak_bytes(layers, limits, most) > gpu_limit:
        most -= 1
    return Bounds(num_layers, fewest, most)


def _taken_if_split(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int
) -> list[int]:
    """:func:`taken_of_host` with 0..L layers on the GPU, all split that may be."""
    _check(layers, limits, 0)
    moved = [layer.host_state_bytes + pending_bytes([layer]) for layer in all_split(layers)]
    on_host = sum(moved) + staging_bytes + limits.host_base
    taken = [on_host - gone for gone in accumulate(moved, initial=0)]
    if limits.shares_host:
        taken = [need + gpu_peak_bytes(layers, limits, k) for k, need in enumerate(taken)]
    return taken


def check_fits(
    layers: Sequence[LayerBytes],
    limits: MemoryLimits,
    staging_bytes: int,
    *,
    num_ranks: int = 1,
    host_weights: int = 0,
    advice: Sequence[str] | None = None,
) -> Bounds:
    """The bounds, where anything fits. To be called before anything is allocated.

    Args:
        staging_bytes: see :func:`host_bytes`.
        num_ranks: ranks that the state is sharded over now; for the advice only.
        host_weights: see :func:`table`.
        advice: what would make it fit; None for what can be told from these arguments.

    Raises:
        MemoryBudgetError: nothing fits. The text has the table of bytes, what is missing where,
            and what would make it fit.
        PlacementError: ``gpu_base_at`` is not one number a layer.
    """
    found = bounds(layers, limits, staging_bytes)
    if found.fits:
        return found
    num_layers = len(layers)
    nearest, best = _nearest(layers, limits, staging_bytes)
    what = "the optimizer state fits in no split between GPU and host"
    if exceeds_gpu(limits):
        what = "the model alone takes more than the GPU has"
    if advice is None:
        advice = _advice(layers, limits, staging_bytes, best, num_ranks)
    columns = sorted({0, nearest, num_layers})
    lines = [
        f"{what} (of this rank; nothing was allocated):",
        table(layers, limits, staging_bytes, columns, host_weights=host_weights),
        f"nearest: {nearest} of {num_layers} layers on the GPU; missing: {_missing(best)}.",
        "What would make it fit:",
        *(f"- {line}" for line in advice),
    ]
    raise MemoryBudgetError("\n".join(lines))


def missing_words(layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int) -> str:
    """What is missing with the number of GPU layers where that is least."""
    number, row = _nearest(layers, limits, staging_bytes)
    both = f" (both, with {number} of {len(layers)} layers on the GPU)"
    return _missing(row) + both * bool(row[_GPU_MISSING] and row[_HOST_MISSING])


def _nearest(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int
) -> tuple[int, Mapping[str, int]]:
    """The number of GPU layers with which the least is missing, and its bytes."""
    splits = [_split(layers, limits, k, staging_bytes) for k in range(len(layers) + 1)]
    return min(enumerate(splits), key=lambda it: it[1][_GPU_MISSING] + it[1][_HOST_MISSING])


def exceeds_gpu(limits: MemoryLimits) -> bool:
    """Whether what is known to be there takes more than the GPU, without any optimizer state."""
    if limits.gpu is None or limits.shares_host:
        return False
    return limits.gpu_base > limits.gpu - limits.gpu_reserve


def _missing(row: Mapping[str, int]) -> str:
    parts = [
        f"{size_text(row[name])} of {side} memory"
        for name, side in ((_GPU_MISSING, "GPU"), (_HOST_MISSING, "host"))
        if row[name]
    ]
    return " and ".join(parts)


def _advice(
    layers: Sequence[LayerBytes],
    limits: MemoryLimits,
    staging_bytes: int,
    best: Mapping[str, int],
    num_ranks: int,
) -> list[str]:
    lines: list[str] = []
    if limits.gpu is not None and best[_GPU_MISSING]:
        if exceeds_gpu(limits):
            lines.append(f"{STREAMED}: weights are kept on the host, too")
        if limits.gpu_base_at:
            lines.append(
                "activation checkpointing or a smaller micro-batch: with the model activations "
                f"take {size_text(limits.gpu_base)} of the GPU's {size_text(limits.gpu)}"
            )
    keys, smaller = fewer_bytes(layers, limits, staging_bytes)
    if keys:
        lines.append(
            f"{keys}: the state then takes {size_text(smaller)} instead of "
            f"{size_text(state_bytes(layers))}"
        )
    ranks = _ranks_that_fit(layers, limits, staging_bytes, num_ranks)
    if ranks is not None:
        lines.append(
            f"{ranks} ranks instead of {num_ranks}, each with as much memory as this one: the "
            "state is sharded over the ranks"
        )
    lines += reserve_advice(layers, limits, staging_bytes)
    return [*lines, "more memory"]


def reserve_advice(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int
) -> list[str]:
    """A reserve that could be smaller, where that is enough."""
    best = _nearest(layers, limits, staging_bytes)[1]
    sides = (
        (best[_GPU_MISSING], limits.gpu_reserve, GPU_RESERVE_KEY),
        (best[_HOST_MISSING], limits.host_reserve, HOST_RESERVE_KEY),
    )
    if any(missing > reserve for missing, reserve, _ in sides):
        return []
    words = " and ".join(
        f'"{key}": {reserve - missing} at most (now {reserve}, {size_text(reserve)})'
        for missing, reserve, key in sides
        if missing
    )
    return [f"a smaller reserve: {words}"] if words else []


def fewer_bytes(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int
) -> tuple[str, int]:
    """The keys of the kinds of moments and master weights closest to these with which the state
    fits, and what it then takes; no keys where none does."""
    if not layers:
        return "", 0
    first = layers[0]
    kinds = MOMENTS[MOMENTS.index(first.moments) :]
    ways = [(kind, first.master) for kind in kinds[1:]]
    if first.master != SPLIT and len(updated_on_cpu(layers)) == len(layers):
        split: MasterName = SPLIT
        ways += [(kind, split) for kind in kinds]
    for kind, master in ways:
        smaller = [replace(layer, moments=kind, master=master) for layer in layers]
        if bounds(smaller, limits, staging_bytes).fits:
            keys = [f'"hytrain.moments": "{kind}"'] if kind != first.moments else []
            keys += ['"hytrain.master": "split" (bf16 only)'] if master != first.master else []
            return " and ".join(keys), state_bytes(smaller)
    return "", 0


def _ranks_that_fit(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int, num_ranks: int
) -> int | None:
    """The fewest ranks over which the state fits; None where no number would do."""
    if num_ranks == 1:  # the first backward of several keeps all gradients
        limits = replace(limits, gpu_base=limits.gpu_base + gradient_bytes(layers))

    def fits(ranks: int) -> bool:
        shards = [
            replace(layer, parameters=math.ceil(layer.parameters * num_ranks / ranks))
            for layer in layers
        ]
        return bounds(shards, limits, staging_bytes).fits

    candidates = range(num_ranks + 1, num_ranks * _MOST_TIMES_RANKS + 1)
    found = bisect_left(candidates, True, key=fits)  # with more ranks it fits all the sooner
    return candidates[found] if found < len(candidates) else None


# -- for people --------------------------------------------------------------------------------


def master_words(layers: Sequence[LayerBytes], k: int) -> str:
    """Which master weights are whole on the host and which split, and what follows from that; empty
    where those on the GPU are not split, or updates not previewed."""
    if not any(_may_be_late(layer) for layer in layers):
        return ""
    late, on_cpu = late_layers(layers, k), len(layers) - k
    if not late:
        return "master weights of layers on the CPU are whole, and updates there previewed"
    room = "the host has no room for whole ones"
    after = "updated after backward"
    if late == on_cpu:
        return f"master weights of layers on the CPU are split, too, and {after}: {room}"
    return (
        f"master weights of the last {late} of {on_cpu} layers on the CPU are split, too, and "
        f"{after}: {room}; those of the others are whole, and their updates previewed"
    )


def table(
    layers: Sequence[LayerBytes],
    limits: MemoryLimits,
    staging_bytes: int,
    gpu_layers: Sequence[int],
    *,
    host_weights: int = 0,
    gpu_weights: int = 0,
    save_bytes: int = 0,
) -> str:
    """Bytes on both sides for some numbers of GPU layers, one column each, in GiB.

    ``host_weights``: of ``staging_bytes``, weights that are kept on the host; ``gpu_weights``:
    those on the GPU, if known; ``save_bytes``: of the host, that whole master weights leave free.

    Raises:
        PlacementError: a number is not in 0..L, or ``gpu_base_at`` is not one number a layer.
    """
    rows = [("layers on the GPU", [f"{k} of {len(layers)}" for k in gpu_layers])]
    shared = staging_bytes, host_weights, save_bytes
    splits = [_split(layers, limits, k, *shared) for k in gpu_layers]
    for name in splits[0]:
        cells = [size_text(split[name]) for split in splits]
        if name == _GPU_BASE and gpu_weights == limits.gpu_base:
            name = "GPU: weights"
        if limits.gpu is None and name in (_GPU_LIMIT, _GPU_RESERVE, _GPU_MISSING):
            if name != _GPU_LIMIT:
                continue
            cells = ["no limit"] * len(splits)
        rows.append((name, cells))
    head = max(len(name) for name, _ in rows)
    width = max(len(cell) for _, cells in rows for cell in cells)
    return "\n".join(
        "  ".join([name.ljust(head), *(cell.rjust(width) for cell in cells)])
        for name, cells in rows
    )


def _split(
    layers: Sequence[LayerBytes],
    limits: MemoryLimits,
    k: int,
    staging_bytes: int,
    host_weights: int = 0,
    save_bytes: int = 0,
) -> dict[str, int]:
    """Bytes with the first ``k`` layers on the GPU, by the names of the table's rows."""
    layers = as_kept(layers, limits, staging_bytes + save_bytes, k)
    state, peak = state_bytes(layers[:k]), gpu_peak_bytes(layers, limits, k)
    waiting = _gpu_rest_bytes(layers, limits, k) - limits.gpu_base
    host, gpu = taken_of_host(layers, limits, staging_bytes, k), limits.gpu
    more = {"host: offloaded activations": limits.host_base} if limits.host_base else {}
    if limits.shares_host:
        more["host: the GPU's, which has no memory of its own"] = peak
        gpu = None
    return {
        "GPU: optimizer state": state,
        _GPU_BASE: peak - state - waiting,
        "GPU: waiting gradients": waiting,
        "GPU: needed at the peak": peak,
        _GPU_LIMIT: limits.gpu or 0,
        _GPU_RESERVE: limits.gpu_reserve,
        _GPU_MISSING: 0 if gpu is None else max(0, peak + limits.gpu_reserve - gpu),
        "host: optimizer state": host_state_bytes(layers[k:]),
        "host: waiting gradients, pinned": pending_bytes(layers[k:]),
        **({"host: weights, pinned": host_weights} if host_weights else {}),
        "host: staging, pinned": staging_bytes - host_weights,
        **more,
        "host: needed": host,
        "host: there is": limits.host,
        "host: kept in reserve": limits.host_reserve,
        _HOST_MISSING: max(0, host + limits.host_reserve - limits.host),
    }
