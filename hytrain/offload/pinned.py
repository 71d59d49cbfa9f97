"""The update worker's pinned memory, which grows and shrinks with the layers on the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hytrain import _C
from hytrain.offload.arena import Arena
from hytrain.offload.slots import NUM_OUTGOING, SlotPlan

_CACHE_LINE = 64
_ARENA_BYTES = 64 << 20
"""Size of the parts in which memory is given back: large enough that registering one costs little
compared with its pages, small compared with all of it."""
_MOST_ARENAS = 64
"""The most arenas that are taken for a slot class at a time."""


def norm_bytes(num_layers: int) -> int:
    """Bytes of the layers' norms: a cache line each, as the worker reads one while the device
    writes the next."""
    return num_layers * _CACHE_LINE


@dataclass(frozen=True, slots=True)
class _Slots:
    """Slots of one class in memory of their own."""

    number: int
    """The class's number."""
    count: int
    arena: Arena


class PinnedMemory:
    """Gives the worker the slots and buffers that the layers on the host need.

    Slots are swapped, so that any of them may hold other layers' pending gradients: those of
    layers that have left are *retired* first. The worker puts no new gradient into a retired slot,
    which is empty one update later; then its memory is given back.
    """

    def __init__(self, plan: SlotPlan, num_norms: int, device: torch.device) -> None:
        """``plan``: slot classes over the chunks of all layers, wherever they are; ``num_norms``:
        pinned float64 numbers, one a layer.
        """
        self._plan = plan
        self._device = device
        self._norms = Arena(norm_bytes(num_norms), device, purpose="the layers' norms")
        self._outgoing: Arena | None = None
        self._slots: list[_Slots] = []
        self._retired: list[_Slots] = []

    @property
    def _arenas(self) -> list[Arena]:
        outgoing = [] if self._outgoing is None else [self._outgoing]
        slots = [slots.arena for slots in (*self._slots, *self._retired)]
        return [self._norms, *outgoing, *slots]

    @property
    def num_bytes(self) -> int:
        """All bytes taken and not given back."""
        return sum(arena.num_bytes for arena in self._arenas)

    def take_norm(self) -> int:
        """Returns the address of the next layer's norm, a float64."""
        return self._norms.take(8, _CACHE_LINE)

    def _counts(self) -> list[int]:
        counts = [0] * len(self._plan.classes)
        for slots in self._slots:
            counts[slots.number] += slots.count
        return counts

    def grow(self, worker: _C.UpdateWorker, on_host: Sequence[bool]) -> None:
        """Takes what is missing for the chunks on the host.

        ``worker``: is given the memory; ``on_host``: for each chunk of the plan, whether its state
        is on the host.

        Raises:
            HostMemoryError: the host does not have that much; nothing has been taken.
        """
        outgoing: Arena | None = None
        with ExitStack() as taken:  # all of it, or nothing
            if any(on_host) and self._outgoing is None:
                outgoing = self._arena(self._plan.buffer_bytes)
                taken.callback(outgoing.close)
            coming: list[_Slots] = []
            needed = zip(self._plan.counts(on_host), self._counts(), strict=True)
            for number, (count, there) in enumerate(needed):
                for part in self._parts(number, max(0, count - there)):
                    slots = _Slots(number, part, self._arena(self._slot_bytes(number) * part))
                    taken.callback(slots.arena.close)
                    coming.append(slots)
            taken.pop_all()
        # Kept even if add_slots fails halfway: the worker already uses the slots it was given, so
        # the memory must stay mapped until close().
        self._slots += coming
        self._outgoing = outgoing or self._outgoing
        for slots in coming:
            size = self._slot_bytes(slots.number)
            worker.add_slots(slots.number, slots.arena.take(size * slots.count), size, slots.count)
        if outgoing is not None:
            size = self._plan.outgoing_bytes
            base = outgoing.take(size * NUM_OUTGOING)
            worker.add_slots(worker.outgoing, base, size, NUM_OUTGOING)

    def _slot_bytes(self, number: int) -> int:
        return self._plan.classes[number].slot_bytes

    def _parts(self, number: int, count: int) -> list[int]:
        """Divides ``count`` slots into the parts in which they can be given back."""
        most = max(_ARENA_BYTES // self._slot_bytes(number), -(-count // _MOST_ARENAS), 1)
        return [min(most, count - begin) for begin in range(0, count, most)]

    def _arena(self, num_bytes: int) -> Arena:
        purpose = "pinned gradients of layers whose state is on the host"
        return Arena(num_bytes, self._device, purpose=purpose)

    # -- giving back -----------------------------------------------------------------------------

    def retire(self, worker: _C.UpdateWorker, on_host: Sequence[bool]) -> int:
        """Has the worker let go of slots that the chunks on the host do not need.

        Returns:
            Bytes that :meth:`release` will give back.
        """
        needed, counts = self._plan.counts(on_host), self._counts()
        going: list[_Slots] = []
        for slots in reversed(self._slots):
            if counts[slots.number] - slots.count >= needed[slots.number]:
                counts[slots.number] -= slots.count
                going.append(slots)
        for slots in going:
            worker.retire_slots(slots.number, slots.arena.address, slots.arena.num_bytes)
            self._slots.remove(slots)
            self._retired.append(slots)
        return sum(slots.arena.num_bytes for slots in going)

    @property
    def is_retiring(self) -> bool:
        """Whether there is memory to give back."""
        return bool(self._retired)

    def release(self, worker: _C.UpdateWorker) -> None:
        """Gives back one part that the worker has let go of; unregistering it takes a while.

        No copy is in flight there: the worker has waited for the events of all of them.
        """
        for slots in self._retired:
            if not worker.is_retiring(slots.arena.address):
                self._retired.remove(slots)
                slots.arena.close()
                return

    def close(self) -> None:
        """Gives everything back. No copy may be in flight. May be called twice."""
        for arena in self._arenas:
            arena.close()
