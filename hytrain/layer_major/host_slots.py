"""Pinned host memory for tensors whose sizes come again every step."""

from __future__ import annotations

import torch

from hytrain.kernels.host_memory import PAGE
from hytrain.offload.host_blocks import HostBlock

_REMEDY = (
    'set "hytrain.activations" to "keep", or make micro-batches or this rank\'s part of the batch '
    "smaller"
)
_WINDOW_STEPS = 8
"""A larger batch may come every few steps: pinning its memory anew each time would cost more."""
_MOST_WASTE = 1.25
"""A slot of more than so many times what it was taken for is given back."""


class HostSlots:
    """Blocks for one tensor each, of exactly the sizes that were asked for; kept as long as steps
    need as much."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._free: list[HostBlock] = []
        self._taken_for: dict[HostBlock, int] = {}
        """Of all slots, the most bytes that each was taken for lately."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.num_bytes for slot in self._taken_for)

    def take(self, num_bytes: int) -> HostBlock:
        """The smallest free slot that is large enough, or a new one.

        Raises:
            HostMemoryError: the host has not that much.
        """
        fitting = [slot for slot in self._free if slot.num_bytes >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda free: free.num_bytes)
            self._free.remove(slot)
            self._taken_for[slot] = max(self._taken_for[slot], num_bytes)
            return slot
        if self._free:
            # Batches that change in length must not leave more and more slots behind.
            self._close(max(self._free, key=lambda free: free.num_bytes))
        slot = HostBlock(num_bytes, self._device, pin=True, purpose="activations", remedy=_REMEDY)
        self._taken_for[slot] = num_bytes
        return slot

    def begin_step(self) -> None:
        """Gives back, after some steps, what none of them needed: of a larger batch before."""
        self._steps += 1
        if self._steps % _WINDOW_STEPS:
            return
        for slot in list(self._free):
            needed = self._taken_for[slot]
            self._taken_for[slot] = 0
            if slot.num_bytes > max(_MOST_WASTE * needed, needed + PAGE):
                self._close(slot)

    def give_back(self, slot: HostBlock) -> None:
        """The slot may be taken again. Its next copy waits for compute, so compute must have been
        made to wait for the last one.
        """
        self._free.append(slot)

    def _close(self, slot: HostBlock) -> None:
        """Gives back a free slot."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a copy from it may still be in flight
        self._free.remove(slot)
        del self._taken_for[slot]
        slot.close()

    def close(self) -> None:
        """Gives all free slots back. No copy may be in flight."""
        for slot in self._free:
            slot.close()
        self._free.clear()
        self._taken_for.clear()
