"""How many pinned buffers of which size the CPU update needs. Plain numbers, no torch.

Every CPU-placed chunk keeps one gradient pending; a few spare slots of each size make the ring
through which new gradients arrive. Slots are swapped, never copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RING_BYTES = 128 << 20
"""Spare room for gradients on their way to the host: some milliseconds of the kernel's work."""
MIN_SPARES = 3
MAX_SPARES = 32
NUM_OUTGOING = 6


@dataclass(frozen=True, slots=True)
class SlotClass:
    """``count`` slots of ``slot_bytes`` each, ``spares`` of them the ring."""

    slot_bytes: int
    count: int
    spares: int


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slot classes, each chunk's class, and the outgoing buffers."""

    classes: tuple[SlotClass, ...]
    class_of_chunk: tuple[int, ...]
    outgoing_bytes: int
    num_outgoing: int

    @property
    def total_bytes(self) -> int:
        """Pinned bytes, without alignment between buffers."""
        slots = sum(c.slot_bytes * c.count for c in self.classes)
        return slots + self.outgoing_bytes * self.num_outgoing


def plan_slots(
    gradient_bytes: Sequence[int], outgoing_bytes: Sequence[int], *, keeps_pending: bool = True
) -> SlotPlan:
    """Groups chunks into classes of similar size.

    Args:
        gradient_bytes: bytes of each chunk's gradient.
        outgoing_bytes: bytes of each chunk's outgoing copy.
        keeps_pending: whether gradients stay until the next update commits them; with direct
            commit the ring alone is needed.

    Returns:
        The plan. A class wastes at most an eighth of a slot, so pinned memory stays close to the
        bytes of the gradients themselves.
    """
    if not gradient_bytes:
        return SlotPlan((), (), 0, 0)
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
        pending = len(members) if keeps_pending else 0
        result.append(SlotClass(slot_bytes, pending + spares, spares))
        for index in members:
            class_of[index] = number
    return SlotPlan(tuple(result), tuple(class_of), max(outgoing_bytes), NUM_OUTGOING)
