"""How many pinned buffers of which size the CPU update needs. Plain numbers, no torch.

Every CPU-placed chunk keeps one gradient pending; a few spare slots of each size make the ring
through which new gradients arrive. Slots are swapped, never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RING_BYTES = 128 << 20
"""Spare memory for gradients being copied to the host: some milliseconds of the kernel's work."""
MIN_SPARES = 3
MAX_SPARES = 32
NUM_OUTGOING = 6


@dataclass(frozen=True, slots=True)
class SlotClass:
    """Slots of ``slot_bytes`` each, of which ``spares`` are the ring that new gradients use."""

    slot_bytes: int
    spares: int


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slot classes, each chunk's class, and the outgoing buffers.

    Attributes:
        classes: largest slots first.
        class_of_chunk: the class of each chunk, in the order they were given.
        keeps_pending: whether a chunk on the host keeps a slot between steps.
        outgoing_bytes: size of one outgoing buffer.
    """

    classes: tuple[SlotClass, ...]
    class_of_chunk: tuple[int, ...]
    keeps_pending: bool
    outgoing_bytes: int

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all outgoing buffers."""
        return NUM_OUTGOING * self.outgoing_bytes

    def counts(self, on_host: Sequence[bool]) -> list[int]:
        """Slots of each class that the chunks on the host need; a class without any needs none.

        ``on_host``: for each chunk, whether its state is on the host.
        """
        members = [0] * len(self.classes)
        for number, is_here in zip(self.class_of_chunk, on_host, strict=True):
            members[number] += is_here
        return [
            (count if self.keeps_pending else 0) + slots.spares if count else 0
            for count, slots in zip(members, self.classes, strict=True)
        ]

    def slot_bytes(self, counts: Sequence[int]) -> int:
        """Bytes of ``counts`` slots, one count per class."""
        return sum(c.slot_bytes * count for c, count in zip(self.classes, counts, strict=True))

    def pinned_bytes(self, on_host: Sequence[bool]) -> int:
        """All pinned bytes, without alignment between buffers, for the chunks on the host."""
        if not any(on_host):
            return 0
        return self.slot_bytes(self.counts(on_host)) + self.buffer_bytes

    @property
    def staging_bytes(self) -> int:
        """The part of the pinned bytes that does not grow with the chunks on the host, at most."""
        spares = sum(c.slot_bytes * c.spares for c in self.classes)
        return spares + self.buffer_bytes


def plan_slots(
    gradient_bytes: Sequence[int],
    outgoing_bytes: Sequence[int],
    *,
    keeps_pending: bool = True,
) -> SlotPlan:
    """Groups chunks into classes of similar size.

    Args:
        gradient_bytes: bytes of each chunk's gradient.
        outgoing_bytes: bytes of each chunk's outgoing copy.
        keeps_pending: whether gradients stay until the next update commits them; with direct
            commit only the ring is needed.

    Returns:
        The plan. A class wastes at most an eighth of a slot, so pinned memory stays close to the
        bytes of the gradients themselves.
    """
    if not gradient_bytes:
        return SlotPlan((), (), keeps_pending, 0)
    order = sorted(range(len(gradient_bytes)), key=lambda i: -gradient_bytes[i])
    classes: list[list[int]] = []
    for index in order:
        size = gradient_bytes[index]
        # Small chunks share a class: their waste is bounded by the smallest slot worth having.
        if classes:
            slot = gradient_bytes[classes[-1][0]]
            if size * 8 >= slot * 7 or slot <= 65536:
                classes[-1].append(index)
                continue
        classes.append([index])
    class_of = [0] * len(gradient_bytes)
    result: list[SlotClass] = []
    for number, members in enumerate(classes):
        slot_bytes = gradient_bytes[members[0]]
        share = RING_BYTES if number == 0 else RING_BYTES // 8
        spares = min(max(share // slot_bytes, MIN_SPARES), MAX_SPARES)
        result.append(SlotClass(slot_bytes, spares))
        for index in members:
            class_of[index] = number
    return SlotPlan(tuple(result), tuple(class_of), keeps_pending, max(outgoing_bytes))
