"""What a block needs to be computed again: its inputs, kept between forward and backward.

They stay on the device, or go to pinned host memory. Then each leaves while its block is computed,
and comes back while the blocks after it are computed again. The device memory of a tensor that has
left is free once the compute stream has waited for its copy; it waits a few tensors later, so that
neither the stream nor the host stands still.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from hytrain.errors import HyTrainError
from hytrain.kernels.host_memory import PAGE
from hytrain.layer_major.graph_cut import NotLayerMajor
from hytrain.offload.host_blocks import HostBlock, is_dense
from hytrain.testing.faults import injected_delays

LEAVING = 2
"""Tensors that stay on the device while they are copied: compute may be that far ahead."""


_REMEDY = (
    'set "hytrain.activations" to "keep", or make micro-batches or this rank\'s part of the batch '
    "smaller"
)
_WINDOW_STEPS = 8
"""Steps after which what none of them needed is given back: a larger batch may come every few
steps, and pinning its memory anew each time would cost more."""
_MOST_WASTE = 1.25
"""A slot of more than this many times what it was taken for is given back."""


class _StreamTicket:
    """A copy under way on a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """Makes what the compute stream runs from now on come after the copy."""
        # Without this wait compute could read a tensor that is not back yet, or write to the memory
        # of one that has not left.
        torch.cuda.current_stream().wait_event(self.event)


class DeviceCopyStream:
    """A stream that copies between device and host beside compute, in the order given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> Ticket:
        """Copies after everything queued so far on the compute stream, and after a ticket, if any.

        The caller keeps both tensors until it has waited for the ticket.
        """
        # Without this wait the copy could read a source that is still being computed, or write to
        # a target whose memory an earlier kernel still reads.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if isinstance(after, _StreamTicket):
            # A copy of another stream: compute need not have waited for it.
            self._stream.wait_event(after.event)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamTicket(event)

    def close(self) -> None:
        """Waits for all copies; no more may follow."""
        self._stream.synchronize()  # the caller unmaps host memory next


class _ThreadTicket:
    def __init__(self, copied: Future[None]) -> None:
        self._copied = copied

    def wait(self) -> None:
        """See :meth:`_StreamTicket.wait`."""
        try:
            self._copied.result()
        except Exception as error:
            raise HyTrainError(f"a copy of an activation failed: {error}") from error


class ThreadCopyStream:
    """The same as :class:`DeviceCopyStream`, by a thread, on a machine without a GPU.

    So a use of memory before its copy is found there, too: with ``HYTRAIN_DELAYS`` it sleeps first.
    """

    def __init__(self) -> None:
        seed, self._most_microseconds = injected_delays()
        self._random = random.Random(seed)
        self._thread = ThreadPoolExecutor(1, "activation copies")

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> Ticket:
        """See :meth:`DeviceCopyStream.copy`."""
        return _ThreadTicket(self._thread.submit(self._copy, target, source, after))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> None:
        if after is not None:
            after.wait()  # the other stream's thread may still be writing the source
        if self._most_microseconds:
            time.sleep(self._random.uniform(0, self._most_microseconds) / 1e6)
        with torch.no_grad():
            target.copy_(source)

    def close(self) -> None:
        """See :meth:`DeviceCopyStream.close`."""
        self._thread.shutdown()


Ticket = _StreamTicket | _ThreadTicket


def make_copy_stream(device: torch.device) -> DeviceCopyStream | ThreadCopyStream:
    """Makes a copy stream for the device."""
    return DeviceCopyStream(device) if device.type == "cuda" else ThreadCopyStream()


class HostSlots:
    """Host blocks for one tensor each, of exactly the sizes that were asked for; kept as long as
    steps need as much."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._free: list[HostBlock] = []
        self._taken_for: dict[HostBlock, int] = {}
        """For each slot, the most bytes that it was taken for lately."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.num_bytes for slot in self._taken_for)

    def take(self, num_bytes: int) -> HostBlock:
        """The smallest free slot that is large enough, or a new one.

        Raises:
            HostMemoryError: the host has too little memory.
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
        """Every few steps, gives back what none of them needed (an earlier batch was larger)."""
        self._steps += 1
        if self._steps % _WINDOW_STEPS:
            return
        for slot in list(self._free):
            needed = self._taken_for[slot]
            self._taken_for[slot] = 0
            if slot.num_bytes > max(_MOST_WASTE * needed, needed + PAGE):
                self._close(slot)

    def give_back(self, slot: HostBlock) -> None:
        """Makes a slot free to be taken again. Its next copy waits for compute, so compute must
        have been made to wait for its last one.
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


class Kept:
    """A tensor's value at the time it was put away, which is left on the device."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        self._version = tensor._version  # pyright: ignore[reportPrivateUsage]

    def check(self) -> None:
        """Checks that the value can still be had.

        Raises:
            NotLayerMajor: the tensor was written to before its value was safe.
        """
        if self.tensor._version != self._version:  # pyright: ignore[reportPrivateUsage]
            raise NotLayerMajor("a block's input is written to in place")

    def take(self) -> torch.Tensor:
        """Returns the value on the device, for the current stream; may be called once only.

        Raises:
            NotLayerMajor: see :meth:`check`.
        """
        self.check()
        return self.tensor


class Offloaded:
    """The same as :class:`Kept`, in host memory; on the device until it has left, and when back."""

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
        """Gives up the device's memory, after the copy."""
        if self._before is None:
            return
        self._before.check()
        # Without this wait the memory's next tensor, on the compute stream, could be written before
        # the copy has read this one.
        self._left.wait()
        self._before = None

    def come(self) -> None:
        """Starts the copy back to the device, if it has not started."""
        if self._before is not None or self._came is not None or self._slot is None:
            return
        here = torch.empty_like(self._host, device=self._store.device)
        # After `_left`: on another stream, the copy could read the slot before it has been filled.
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
        """Frees the slot: a later copy into it comes after those of this tensor."""
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
    """Keeps tensors between blocks in host memory until backward."""

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
        """Drops whatever a step that was given up has left, so that nothing is held."""
        self._leaving.clear()
        for held in list(self._held.values()):
            held.release()
        self._slots.begin_step()

    def put(self, tensor: torch.Tensor, *, is_boundary: bool) -> Kept | Offloaded:
        """Puts a block's input away; ``is_boundary``: it only leads from one block to the next."""
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
        """Starts to bring back tensors that will be taken soon."""
        for tensor in held:
            if isinstance(tensor, Offloaded):
                tensor.come()

    def released(self, held: Offloaded, slot: HostBlock) -> None:
        """Forgets a tensor that is not held any more, and frees its slot."""
        del self._held[id(held)]
        self._slots.give_back(slot)

    def close(self) -> None:
        """Gives the host memory back. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        # Copy streams first: the slots are unmapped below.
        self.to_host.close()
        self.to_device.close()
        self.begin_step()
        self._slots.close()
