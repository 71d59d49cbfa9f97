"""Which layers have split master weights: all, or only those on the GPU.

Whole ones on the CPU take 2 bytes a parameter more there, and their updates are previewed in
backward. Split ones are updated when the step's outcome is known, which nothing hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hytrain.errors import size_text
from hytrain.formats.moment_kinds import FP32
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import bounds, gpu_peak_bytes

LEAST_FREE_SHARE = 0.25
"""Of the GPU memory that is free without any layer's state there: what activations will take is
not known before the first step, and the form of master weights stays."""


def with_whole_on_host(layers: Sequence[LayerBytes]) -> tuple[LayerBytes, ...]:
    """The same layers with whole master weights on the CPU."""
    return tuple(replace(layer, host_master=FP32) for layer in layers)


def whole_on_host(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int, fixed: int | None
) -> tuple[bool, str]:
    """Whether master weights of layers on the CPU are whole where others are split, and why.

    Args:
        layers: this rank's shards, with whole ones on the CPU.
        limits: what this rank may use, before the first step.
        staging_bytes: see :func:`~hytrain.placement.memory.host_bytes`.
        fixed: the number of GPU layers; None: it is solved.
    """
    found = bounds(layers, limits, staging_bytes)
    fewest = found.min_gpu_layers
    missing = None
    if fewest > (found.max_gpu_layers if fixed is None else fixed):
        missing = "the host has no room"
        if fewest <= found.num_layers:
            missing += f" with fewer than {fewest} layers on the GPU"
        if fixed is None:
            missing += f", which has room for {found.max_gpu_layers}"
    elif fixed is None and limits.gpu is not None:
        free, most = (_free(layers, limits, k) for k in (fewest, 0))
        if free < LEAST_FREE_SHARE * most:
            missing = (
                f"{fewest} layers on the GPU, the fewest that fit then, leave activations "
                f"{size_text(free)} of {size_text(most)} there, less than a quarter"
            )
    if missing is None:
        return True, "master weights of layers on the CPU are whole, and updates there previewed"
    return False, f"master weights of layers on the CPU are split, too: if whole, {missing}"


def _free(layers: Sequence[LayerBytes], limits: MemoryLimits, k: int) -> int:
    assert limits.gpu is not None
    return limits.gpu - limits.gpu_reserve - gpu_peak_bytes(layers, limits, k)
