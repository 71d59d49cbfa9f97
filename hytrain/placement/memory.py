"""The memory budget: which numbers of GPU layers fit, on one rank. Bytes in, bytes out.

A layer's optimizer state (fp32 master weights and two moments: 12 bytes a parameter, 8 or 6 if
moments are kept in fewer, 2 less if master weights are split, on the CPU those of as few layers
as memory demands) is on the GPU or on the host. On either side its gradient waits for the step's
outcome as well: on the GPU for the update, on the host, pinned, for the commit. With direct commit
it waits for neither: on the GPU the gradients of two launches are there at one time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hytrain.errors import PlacementError
from hytrain.formats.moment_kinds import (
    FP32,
    MASTER_BYTES,
    SPLIT_BYTES,
)
from hytrain.offload.update_groups import IN_FLIGHT, LIMITS
from hytrain.placement.costs import LayerBytes, MemoryLimits

GPU_RESERVE_SHARE = 0.04
HOST_RESERVE_SHARE = 0.03
LEAST_RESERVE = 1024**3
"""Bytes that stay free if the user gives no number, or a share of the memory if that is more."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The numbers of GPU layers that fit.

    Attributes:
        num_layers: L.
        min_gpu_layers: the fewest with which the rest fits on the host; L + 1 if the host cannot
            even hold what is needed with no layer on it.
        max_gpu_layers: the most that fit on the GPU; -1 if it cannot even hold the model alone.
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
        """The least difference in layers that counts: a tenth of them, two at least."""
        return max(2, math.ceil(0.1 * self.num_layers))


def gpu_reserve(given: int | None, total: int) -> int:
    """GPU bytes that stay free of ``total``."""
    return given if given is not None else max(LEAST_RESERVE, int(GPU_RESERVE_SHARE * total))


def host_reserve(given: int | None, total: int) -> int:
    """Host bytes that stay free of ``total``."""
    return given if given is not None else max(LEAST_RESERVE, int(HOST_RESERVE_SHARE * total))


# -- what is needed ----------------------------------------------------------------------------


def state_bytes(layers: Sequence[LayerBytes]) -> int:
    """Bytes of the optimizer state of these layers on the GPU."""
    return sum(layer.state_bytes for layer in layers)


def host_state_bytes(layers: Sequence[LayerBytes]) -> int:
    """Bytes of the optimizer state of these layers on the host."""
    return sum(layer.host_state_bytes for layer in layers)


def pending_bytes(layers: Sequence[LayerBytes]) -> int:
    """Bytes of gradients of these layers that wait on the host for their commit."""
    return gradient_bytes([layer for layer in updated_on_cpu(layers) if layer.keeps_pending])


def updated_on_cpu(layers: Sequence[LayerBytes]) -> list[LayerBytes]:
    """The layers that the CPU updates if their state is on the host."""
    return [layer for layer in layers if not layer.is_streamed]


def placed_bytes(layers: Sequence[LayerBytes], k: int) -> int:
    """GPU bytes for state with the first ``k`` layers there; streamed layers take some as well."""
    work = max((layer.work_bytes for layer in layers), default=0)
    return state_bytes(layers[:k]) + work + buffer_bytes(layers, k)


def buffer_bytes(layers: Sequence[LayerBytes], k: int) -> int:
    """The part of :func:`placed_bytes` to which pieces of streamed state are copied."""
    largest = max((layer.piece_bytes for layer in layers), default=0)
    return IN_FLIGHT * largest * any(layer.is_streamed for layer in layers[k:])


def gradient_bytes(layers: Sequence[LayerBytes]) -> int:
    """Bytes of gradients of these layers that wait on the GPU for the outcome of the step."""
    return sum(layer.parameters * layer.gradient_itemsize for layer in layers)


def waiting_bytes(layers: Sequence[LayerBytes], k: int) -> int:
    """The most bytes of gradients that wait on the GPU, with the first ``k`` layers there."""
    return max(_waiting_at(layers, k), default=0)


def most_waiting(layers: Sequence[LayerBytes]) -> int:
    """The most bytes of these layers' gradients that can wait on the GPU at one time."""
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
    layer's backward uses and of the GPU-placed gradients that are there by its end. If that use
    has not been measured: plus ``gpu_base`` and the most of those gradients, which do not coincide.

    Raises:
        PlacementError: ``k`` is not in 0..L, or ``gpu_base_at`` is not one number a layer.
    """
    _check(layers, limits, k)
    return placed_bytes(layers, k) + _gpu_rest_bytes(layers, limits, k)


def _gpu_rest_bytes(layers: Sequence[LayerBytes], limits: MemoryLimits, k: int) -> int:
    """The GPU's peak without the state."""
    if not limits.gpu_base_at:
        # If gradients are kept between micro-batches, those that wait are among them.
        return limits.gpu_base + max(waiting_bytes(layers, k), limits.kept_gradients)
    # The peak of all may be no layer's backward (the loss): no gradient waits there yet.
    waiting = _waiting_at(layers, k)
    at = (base + more for base, more in zip(limits.gpu_base_at, waiting, strict=True))
    return max(limits.gpu_base, *at)


def _waiting_at(layers: Sequence[LayerBytes], k: int) -> list[int]:
    """Bytes of gradients that may wait on the GPU by the end of each layer's backward.

    Those of streamed layers wait until the step's end, wherever the state is.
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

    With the first ``k`` layers there: one number a layer, once its gradient has come. None if
    nothing bounds them, or what backward uses has not been measured.
    """
    if limits.gpu is None or not limits.gpu_base_at:
        return None
    # There is room for two in any case: see GradientRoom.
    free = limits.gpu - limits.gpu_reserve - placed_bytes(layers, k)
    free += 2 * max(gradient_bytes([layer]) for layer in layers)
    each = zip(layers, limits.gpu_base_at, _waiting_at(layers, k), strict=True)
    return [(free - base - waiting) // layer.gradient_itemsize for layer, base, waiting in each]


def host_bytes(layers: Sequence[LayerBytes], k: int, staging_bytes: int) -> int:
    """Bytes that the host holds with all but the first ``k`` layers there.

    ``staging_bytes``: pinned staging, taken once and kept whatever ``k`` is.

    Raises:
        PlacementError: ``k`` is not in 0..L.
    """
    _check_number(k, len(layers))
    return host_state_bytes(layers[k:]) + pending_bytes(layers[k:]) + staging_bytes


def taken_of_host(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int, k: int
) -> int:
    """Bytes that ``limits.host`` must hold with the first ``k`` layers on the GPU.

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
    """The same layers, with master weights kept on the host as they are on the GPU."""
    return tuple(replace(layer, host_master=None) for layer in layers)


def first_late_layers(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int
) -> list[int]:
    """For 0..L GPU layers, the first layer that is split on the CPU as well; L if none is.

    Updates of such layers are late, after backward. So master weights are whole there as far as the
    host has room, and late layers are the last in forward order: the next forward needs them last.
    Empty if master weights are not split, or updates not previewed.

    Raises:
        PlacementError: ``gpu_base_at`` is not one number a layer.
    """
    if not any(layer.may_be_late for layer in layers):
        return []
    until = list(accumulate((_bytes_of_whole(layer) for layer in layers), initial=0))
    limit, taken = limits.host - limits.host_reserve, _taken_if_split(layers, limits, staging_bytes)
    return [
        max(k, bisect_right(until, until[k] + limit - needed) - 1) for k, needed in enumerate(taken)
    ]


def _bytes_of_whole(layer: LayerBytes) -> int:
    """Bytes that a whole layer on the host takes more than a split one."""
    return (MASTER_BYTES - SPLIT_BYTES) * layer.parameters * layer.may_be_late


def as_kept(
    layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int, k: int
) -> tuple[LayerBytes, ...]:
    """The layers with master weights on the host as :func:`first_late_layers` has them."""
    first = first_late_layers(layers, limits, staging_bytes)
    return tuple(
        replace(layer, host_master=FP32 if layer.may_be_late and index < first[k] else None)
        for index, layer in enumerate(layers)
    )


def late_layers(layers: Sequence[LayerBytes], k: int) -> int:
    """The number of layers that are updated late with the first ``k`` on the GPU."""
    return sum(layer.may_be_late and layer.host_master is None for layer in layers[k:])


# -- what fits ---------------------------------------------------------------------------------


def bounds(layers: Sequence[LayerBytes], limits: MemoryLimits, staging_bytes: int) -> Bounds:
    """The smallest number of GPU layers that fits the host, the largest that fits the GPU.

    Whether they leave anything is :attr:`Bounds.fits`; :func:`check_fits` explains why if not.

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
    """:func:`taken_of_host` with 0..L layers on the GPU, if all layers that may be are split."""
    _check(layers, limits, 0)
    moved = [layer.host_state_bytes + pending_bytes([layer]) for layer in all_split(layers)]
    on_host = sum(moved) + staging_bytes + limits.host_base
    taken = [on_host - gone for gone in accumulate(moved, initial=0)]
    if limits.shares_host:
        taken = [need + gpu_peak_bytes(layers, limits, k) for k, need in enumerate(taken)]
    return taken
