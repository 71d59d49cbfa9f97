"""Reports the memory budget to people: a table of bytes and, if nothing fits, what would."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hytrain.errors import MemoryBudgetError, size_text
from hytrain.formats.moment_kinds import MOMENTS, SPLIT, MasterName
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import (
    Bounds,
    as_kept,
    bounds,
    gpu_peak_bytes,
    gradient_bytes,
    host_state_bytes,
    late_layers,
    pending_bytes,
    placed_bytes,
    state_bytes,
    taken_of_host,
    updated_on_cpu,
)

GPU_RESERVE_KEY = "hytrain.solver.gpu_memory_reserve_bytes"
HOST_RESERVE_KEY = "hytrain.solver.host_memory_reserve_bytes"
STREAMED = 'ZeRO stage 3 with "offload_param": {"device": "cpu"}'

_GPU_LIMIT, _GPU_RESERVE = "GPU: there is", "GPU: kept in reserve"
_GPU_BASE = "GPU: weights, known activations and gradients"
_GPU_MISSING, _HOST_MISSING = "GPU: missing", "host: missing"
# Advice of more than this many times as many ranks as now is useless.
_MOST_TIMES_RANKS = 1024


def check_fits(
    layers: Sequence[LayerBytes],
    limits: MemoryLimits,
    staging_bytes: int,
    *,
    num_ranks: int = 1,
    host_weights: int = 0,
    advice: Sequence[str] | None = None,
) -> Bounds:
    """Returns the bounds, if anything fits. To be called before anything is allocated.

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
    """What is missing with the number of GPU layers for which that is least, in words."""
    number, row = _nearest(layers, limits, staging_bytes)
    both = f" (both, with {number} of {len(layers)} layers on the GPU)"
    return _missing(row) + both * bool(row[_GPU_MISSING] and row[_HOST_MISSING])


def _nearest(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int
) -> tuple[int, Mapping[str, int]]:
    """The number of GPU layers with which the least is missing, and its column of bytes."""
    splits = [_split(layers, limits, k, staging_bytes) for k in range(len(layers) + 1)]
    return min(enumerate(splits), key=lambda it: it[1][_GPU_MISSING] + it[1][_HOST_MISSING])


def exceeds_gpu(limits: MemoryLimits) -> bool:
    """Whether what is known to be needed exceeds the GPU even without any optimizer state."""
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
    """Advises smaller reserves, if these are enough."""
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
    """The settings of moments and master weights closest to the present ones with which the state
    fits, and the bytes that it then takes; empty if there are none."""
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
    """The fewest ranks over which the state fits; None if no number would do."""
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
    if those on the GPU are not split, or updates not previewed."""
    if not any(layer.may_be_late for layer in layers):
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

    ``host_weights``: the part of ``staging_bytes`` for weights kept on the host; ``gpu_weights``:
    those on the GPU, if known; ``save_bytes``: host bytes that whole master weights leave free.

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
    waiting = peak - placed_bytes(layers, k) - limits.gpu_base
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
