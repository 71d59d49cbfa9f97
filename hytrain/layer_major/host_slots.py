"""Pinned host memory for tensors whose sizes come again every step."""

from __future__ import annotations

import ctypes

import torch

from hytrain.offload.arena import Arena

_REMEDY = (
    'set "hytrain.activations" to "keep", or make micro-batches or this rank\'s part of the batch '
    "smaller"
)


class HostSlot:
    """Memory for one tensor."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._arena = Arena(num_bytes, device, purpose="activations", remedy=_REMEDY)
        self.num_bytes = self._arena.num_bytes

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
    """Slots of exactly the sizes that were asked for; they are kept for the next step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
            return slot
        if self._free:
            # Batches that change in length must not leave more and more slots behind.
            largest = max(self._free, key=lambda free: free.num_bytes)
            self._free.remove(largest)
            self._close(largest)
        slot = HostSlot(num_bytes, self._device)
        self.num_bytes += slot.num_bytes
        return slot

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
