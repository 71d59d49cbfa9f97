"""Pinned memory of the update worker: it grows when layers come to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hytrain import _C
from hytrain.offload.arena import Arena
from hytrain.offload.slots import NUM_OUTGOING, SlotPlan

_CACHE_LINE = 64


def norm_bytes(num_layers: int) -> int:
    """Of the layers' norms: a cache line each, as the worker reads one while the device writes the
    next."""
    return num_layers * _CACHE_LINE


class PinnedMemory:
    """Gives the worker the slots and buffers that the layers on the host need.

    Slots of layers that have left stay in the pool: slots are swapped, so other layers' pending
    gradients may be in any of them, and the next layer that comes uses them.
    """

    def __init__(self, plan: SlotPlan, num_norms: int, device: torch.device) -> None:
        """
        Args:
            plan: slot classes over the chunks of all layers, wherever they are.
            num_norms: pinned float64 numbers, one a layer.
            device: whose copies use the memory.
        """
        self._plan = plan
        self._device = device
        self._counts = [0] * len(plan.classes)
        self._has_outgoing = False
        self._arenas = [Arena(norm_bytes(num_norms), device, purpose="the layers' norms")]

    @property
    def num_bytes(self) -> int:
        """All bytes taken so far."""
        return sum(arena.num_bytes for arena in self._arenas)

    @property
    def is_pinned(self) -> bool:
        """Whether all of it is registered with the driver."""
        return all(arena.is_pinned for arena in self._arenas)

    def take_norm(self) -> int:
        """Address of the next layer's float64."""
        return self._arenas[0].take(8, _CACHE_LINE)

    def missing_bytes(self, on_host: Sequence[bool]) -> int:
        """Bytes that :meth:`grow` would take for so many chunks on the host."""
        missing = [max(0, n - c) for n, c in zip(self._needed(on_host), self._counts, strict=True)]
        outgoing = self._plan.outgoing_bytes * NUM_OUTGOING
        return self._plan.slot_bytes(missing) + (
            outgoing if any(on_host) and not self._has_outgoing else 0
        )

    def grow(self, worker: _C.UpdateWorker, on_host: Sequence[bool]) -> None:
        """Takes what is missing for the chunks on the host.

        Args:
            worker: whose it becomes.
            on_host: for each chunk of the plan, whether its state is on the host.

        Raises:
            HostMemoryError: the host has not that much.
        """
        if not any(on_host):
            return
        missing_bytes = self.missing_bytes(on_host)
        if missing_bytes == 0:
            return
        arena = Arena(
            missing_bytes + _CACHE_LINE * (len(self._counts) + 1),
            self._device,
            purpose="pinned gradients of layers whose state is on the host",
        )
        # Kept even if add_slots fails halfway: the worker already uses the slots it was given, so
        # the memory must stay mapped until close().
        self._arenas.append(arena)
        for number, needed in enumerate(self._needed(on_host)):
            count = needed - self._counts[number]
            if count > 0:
                size = self._plan.classes[number].slot_bytes
                worker.add_slots(number, arena.take(size * count), size, count)
                self._counts[number] = needed
        if not self._has_outgoing:
            size = self._plan.outgoing_bytes
            worker.add_slots(worker.outgoing, arena.take(size * NUM_OUTGOING), size, NUM_OUTGOING)
            self._has_outgoing = True

    def _needed(self, on_host: Sequence[bool]) -> list[int]:
        return self._plan.counts(on_host)

    def close(self) -> None:
        """Gives everything back. No copy may be in flight. May be called twice."""
        for arena in self._arenas:
            arena.close()
