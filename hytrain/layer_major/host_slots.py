"""Pinned host memory for tensors whose sizes come again every step."""

from __future__ import annotations

import ctypes

import torch

from hytrain.kernels.host_memory import PAGE
from hytrain.offload.arena import Arena

_REMEDY = (
    'set "hytrain.activations" to "keep", or make micro-batches or this rank\'s part of the batch '
    "smaller"
)


_WINDOW_STEPS = 8
"""A larger batch may come every few steps: pinning its memory anew each time would cost more."""
_MOST_WASTE = 1.25
"""A slot of more than so many times what it was taken for is given back."""


class HostSlot:
    """Memory for one tensor."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._arena = Arena(num_bytes, device, purpose="activations", remedy=_REMEDY)
        self.num_bytes = self._arena.num_bytes
        self.taken_for = 0
        """The most bytes that it was taken for lately."""

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in this memory, of the other one's shape, strides and dtype.

        Args:
            tensor: dense: every element of its memory is one of its own.
        """
        size = tensor.numel() * tensor.element_size()
        memory = (ctypes.c_char * size).from_address(self._arena.address)
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel())
        return flat.as_strided(tensor.size(), tensor.stride())

    def close(self) -> None:
        """Gives the memory back; no tensor in it may be used any more."""
        self._arena.close()


class HostSlots:
    """Slots of exactly the sizes that were asked for; kept as long as steps need as much."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._free: list[HostSlot] = []
        self.num_bytes = 0
        """Bytes of all slots."""

    def take(self, num_bytes: int) -> HostSlot:
        """The smallest free slot that is large enough, or a new one.

        Raises:
            HostMemoryError: the host has not that much.
        """
        fitting = [slot for slot in self._free if slot.num_bytes >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda free: free.num_bytes)
            self._free.remove(slot)
            slot.taken_for = max(slot.taken_for, num_bytes)
            return slot
        if self._free:
            # Batches that change in length must not leave more and more slots behind.
            largest = max(self._free, key=lambda free: free.num_bytes)
            self._free.remove(largest)
            self._close(largest)
        slot = HostSlot(num_bytes, self._device)
        self.num_bytes += slot.num_bytes
        slot.taken_for = num_bytes
        return slot

    def begin_step(self) -> None:
        """Gives back, after some steps, what none of them needed: of a larger batch before."""
        self._steps += 1
        if self._steps % _WINDOW_STEPS:
            return
        for slot in list(self._free):
            if slot.num_bytes > max(_MOST_WASTE * slot.taken_for, slot.taken_for + PAGE):
                self._free.remove(slot)
                self._close(slot)
            slot.taken_for = 0

    def give_back(self, slot: HostSlot) -> None:
        """The slot may be taken again. Its next copy waits for compute, so compute must have been
        made to wait for the last one.
        """
        self._free.append(slot)

    def _close(self, slot: HostSlot) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a copy from it may still be in flight
        self.num_bytes -= slot.num_bytes
        slot.close()

    def close(self) -> None:
        """Gives all free slots back. No copy may be in flight."""
        for slot in self._free:
            slot.close()
        self._free.clear()
        self.num_bytes = 0
