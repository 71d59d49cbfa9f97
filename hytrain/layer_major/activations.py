"""What a block needs to be computed again: its inputs, kept between forward and backward.

On the device as they are, or in pinned host memory. There each leaves while its block is computed,
and comes back while the blocks behind it are. The device memory of a tensor that has left is free
once the compute stream has waited for its copy; it waits a few tensors later, so that neither the
stream nor the host stands still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from hytrain.layer_major.copy_streams import Ticket, make_copy_stream
from hytrain.layer_major.graph_cut import NotLayerMajor
from hytrain.layer_major.host_slots import HostSlots
from hytrain.offload.host_blocks import HostBlock, is_dense

LEAVING = 2
"""Tensors that stay on the device while they are copied: the compute stream is that far ahead."""


class Kept:
    """A tensor's value as it was when it was put away: on the device, as it is."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self._version = tensor._version  # pyright: ignore[reportPrivateUsage]

    def check(self) -> None:
        """Whether the value can still be had.

        Raises:
            NotLayerMajor: the tensor was written to before its value was safe.
        """
        if self.tensor._version != self._version:  # pyright: ignore[reportPrivateUsage]
            raise NotLayerMajor("a block's input is written to in place")

    def take(self) -> torch.Tensor:
        """The value, on the device; for the current stream, and once only.

        Raises:
            NotLayerMajor: as :meth:`check`.
        """
        self.check()
        return self.tensor


class Offloaded:
    """As :class:`Kept`, in host memory; on the device before its copy has left, and when back."""

    def __init__(self, store: OffloadedActivations, tensor: torch.Tensor, slot: HostBlock) -> None:
        self._store = store
        before = Kept(tensor)
        self._before: Kept | None = before
        self._slot: HostBlock | None = slot
        (self._host,) = slot.cut([tensor])
        self._left = store.to_host.copy(self._host, before.tensor, None)
        self._came: tuple[torch.Tensor, Ticket] | None = None

    @property
    def is_here(self) -> bool:
        """Whether it has not left the device."""
        return self._before is not None

    def check(self) -> None:
        """See :meth:`Kept.check`."""
        if self._before is not None:
            self._before.check()

    def leave(self) -> None:
        """The device's memory is given up, behind the copy."""
        if self._before is None:
            return
        self._before.check()
        # Without this wait the memory's next tensor, on the compute stream, could be written before
        # the copy has read this one.
        self._left.wait()
        self._before = None

    def come(self) -> None:
        """The way back begins, if it has not."""
        if self._before is not None or self._came is not None or self._slot is None:
            return
        here = torch.empty_like(self._host, device=self._store.device)
        # After `_left`: on another lane, the copy could read the slot before it has been filled.
        self._came = here, self._store.to_device.copy(here, self._host, self._left)

    def take(self) -> torch.Tensor:
        """See :meth:`Kept.take`."""
        if self._before is not None:
            here = self._before.take()
        else:
            self.come()
            assert self._came is not None
            here, back = self._came
            back.wait()  # or the block would read a tensor that is not back yet
        self.release()
        return here

    def release(self) -> None:
        """The slot is free: a later copy into it comes behind those of this tensor."""
        if self._slot is None:
            return
        # The slot's next copy waits for compute only: without these waits it could overwrite the
        # slot, or this tensor's memory be reused, while a copy is in flight.
        self._left.wait()
        if self._came is not None:
            self._came[1].wait()
        slot, self._slot, self._before, self._came = self._slot, None, None, None
        self._store.released(self, slot)


class OffloadedActivations:
    """Where tensors between blocks wait for backward in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host = make_copy_stream(device)
        self.to_device = make_copy_stream(device)
        self._slots = HostSlots(device)
        self._held: dict[int, Offloaded] = {}
        self._leaving: deque[Offloaded] = deque()
        self._is_closed = False

    @property
    def host_bytes(self) -> int:
        """Pinned memory taken so far."""
        return self._slots.num_bytes

    def begin_step(self) -> None:
        """Nothing is held: whatever a step that was given up has left is dropped."""
        self._leaving.clear()
        for held in list(self._held.values()):
            held.release()
        self._slots.begin_step()

    def put(self, tensor: torch.Tensor, *, is_boundary: bool) -> Kept | Offloaded:
        """Puts a block's input away; ``is_boundary``: it leads from one block to the next only."""
        has_own_memory = tensor.layout == torch.strided and tensor.numel() and is_dense(tensor)
        if not is_boundary or tensor.device != self.device or not has_own_memory:
            return Kept(tensor)
        slot = self._slots.take(tensor.numel() * tensor.element_size())
        held = Offloaded(self, tensor, slot)
        self._held[id(held)] = held
        self._leaving.append(held)
        while len(self._leaving) > LEAVING:
            self._leaving.popleft().leave()
        return held

    def expect(self, held: Sequence[Kept | Offloaded]) -> None:
        """These are going to be taken soon."""
        for tensor in held:
            if isinstance(tensor, Offloaded):
                tensor.come()

    def released(self, held: Offloaded, slot: HostBlock) -> None:
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
