"""Activations between blocks wait for backward in pinned host memory.

Each leaves while its block is computed, and comes back while the blocks behind it are. The device
memory of a tensor that has left is free once the compute stream has waited for its copy; it waits
a few tensors later, so that neither the stream nor the host stands still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hytrain.layer_major.activations import HeldTensor, Kept, check_unchanged
from hytrain.layer_major.copy_streams import CopyStream, Ticket, make_copy_stream
from hytrain.layer_major.host_slots import HostSlot, HostSlots

LEAVING = 2
"""Tensors that stay on the device while they are copied: the compute stream is that far ahead."""


class Offloaded:
    """A tensor in host memory; on the device before its copy has left and after it is back."""

    def __init__(self, store: OffloadedActivations, tensor: torch.Tensor, slot: HostSlot) -> None:
        self._store = store
        self._here: torch.Tensor | None = tensor.detach()
        self._version = tensor._version  # pyright: ignore[reportPrivateUsage]
        self._slot: HostSlot | None = slot
        self._host = slot.like(tensor)
        self._left = store.to_host.copy(self._host, self._here, None)
        self._back: Ticket | None = None

    def check(self) -> None:
        """See :class:`~hytrain.layer_major.activations.HeldTensor`."""
        if self._here is not None and self._back is None:
            check_unchanged(self._here, self._version)

    def leave(self) -> None:
        """The device's memory is given up, behind the copy."""
        if self._here is None or self._back is not None:
            return
        self.check()
        # Without this wait the memory's next tensor, on the compute stream, could be written before
        # the copy has read this one.
        self._left.wait()
        self._here = None

    def come(self) -> None:
        """The way back begins, if it has not."""
        if self._here is not None or self._slot is None:
            return
        self._here = torch.empty_like(self._host, device=self._store.device)
        # After `_left`: on another lane, the copy could read the slot before it has been filled.
        self._back = self._store.to_device.copy(self._here, self._host, self._left)

    def take(self) -> torch.Tensor:
        """See :class:`~hytrain.layer_major.activations.HeldTensor`."""
        self.check()
        self.come()
        if self._back is not None:
            self._back.wait()  # or the block would read a tensor that is not back yet
        here = self._here
        assert here is not None
        self.release()
        return here

    def release(self) -> None:
        """The slot is free: a later copy into it comes behind those of this tensor."""
        if self._slot is None:
            return
        # The slot's next copy waits for compute only: without these waits it could overwrite the
        # slot, or this tensor's memory be reused, while a copy is in flight.
        self._left.wait()
        if self._back is not None:
            self._back.wait()
        slot, self._slot, self._here = self._slot, None, None
        self._store.released(self, slot)


class OffloadedActivations:
    """See :class:`~hytrain.layer_major.activations.ActivationStore`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host: CopyStream = make_copy_stream(device)
        self.to_device: CopyStream = make_copy_stream(device)
        self._slots = HostSlots(device)
        self._held: dict[int, Offloaded] = {}
        self._leaving: deque[Offloaded] = deque()
        self._is_closed = False

    @property
    def host_bytes(self) -> int:
        """Pinned memory taken so far."""
        return self._slots.num_bytes

    def begin_step(self) -> None:
        """See :class:`~hytrain.layer_major.activations.ActivationStore`."""
        self._leaving.clear()
        for held in list(self._held.values()):
            held.release()
        self._slots.begin_step()

    def put(self, tensor: torch.Tensor, *, is_boundary: bool) -> HeldTensor:
        """See :class:`~hytrain.layer_major.activations.ActivationStore`."""
        if not is_boundary or tensor.device != self.device or not _is_dense(tensor):
            return Kept(tensor)
        slot = self._slots.take(tensor.numel() * tensor.element_size())
        held = Offloaded(self, tensor, slot)
        self._held[id(held)] = held
        self._leaving.append(held)
        while len(self._leaving) > LEAVING:
            self._leaving.popleft().leave()
        return held

    def expect(self, held: Sequence[HeldTensor]) -> None:
        """See :class:`~hytrain.layer_major.activations.ActivationStore`."""
        for tensor in held:
            if isinstance(tensor, Offloaded):
                tensor.come()

    def released(self, held: Offloaded, slot: HostSlot) -> None:
        """A tensor is not held any more."""
        del self._held[id(held)]
        self._slots.give_back(slot)

    def close(self) -> None:
        """Gives the host memory back. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        # Lanes first: the slots are unmapped below.
        self.to_host.close()
        self.to_device.close()
        self.begin_step()
        self._slots.close()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor with memory of its own could have the same strides."""
    if tensor.numel() == 0 or tensor.layout != torch.strided:
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
