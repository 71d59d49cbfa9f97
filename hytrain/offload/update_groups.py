"""Which neighbours are updated together on the device. Plain data: plans count launches by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """How much is updated together.

    Attributes:
        first_elements: of the first group. The next forward waits for a layer's whole launch: the
            first one is small, and each may have twice as many elements as the one before it.
        most_elements: of any group.
        most_layers: likewise.
        alone_elements: a layer of more is updated alone: its launch costs little beside its update,
            and the event behind that lets the next forward begin sooner.
    """

    first_elements: int = 16 << 20
    most_elements: int = 64 << 20
    most_layers: int = 8
    alone_elements: int = 32 << 20


LIMITS = GroupLimits()


def group_begins(
    sizes: Sequence[int], groupable: Sequence[bool], limits: GroupLimits = LIMITS
) -> list[int]:
    """The first layer of each group.

    A group depends on the layers before it only: those of the first K layers are these, cut at K.

    Args:
        sizes: elements of each layer's shard, in order.
        groupable: whether its update may share a launch.
        limits: see :class:`GroupLimits`.
    """
    begins: list[int] = []
    limit, taken = limits.first_elements, 0
    for index, size in enumerate(sizes):
        taken += size
        if (
            not begins
            or index - begins[-1] == limits.most_layers
            or taken > limit
            or max(size, sizes[index - 1]) > limits.alone_elements
            or not (groupable[index] and groupable[index - 1])
        ):
            limit = min(limits.most_elements, limit * 2) if begins else limit
            begins.append(index)
            taken = size
    return begins
