"""Which neighbours are updated together on the device. Plain data: plans count launches by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """How much is updated together.

    Attributes:
        first_elements: of the first group. The next forward waits for a layer's whole launch: the
            first one is small, and each may have twice as many elements as the one before it.
        most_elements: of any group.
        most_layers: likewise.
        earlier_share: a group may have this share of all elements before it as well. With a half
            its update is done when 1.5 times as long has passed as all before it took: forward,
            which has come through those, need not wait where it takes 1.5 times as long as updates.
    """

    first_elements: int = 16 << 20
    most_elements: int = 64 << 20
    most_layers: int = 8
    earlier_share: float = 0.5

    def in_backward(self) -> GroupLimits:
        """Where a group is updated as soon as its gradients have come: they wait for each other,
        so that what waits is bounded."""
        return replace(self, earlier_share=0.0)


LIMITS = GroupLimits()

IN_FLIGHT = 2
"""Pieces of streamed state on the device: one comes or leaves while the other is updated."""
ONE_GROUP = GroupLimits(_NO_LIMIT, _NO_LIMIT, _NO_LIMIT)
"""Of neighbours that may share a launch."""


def group_begins(
    sizes: Sequence[int], groupable: Sequence[bool], limits: GroupLimits = LIMITS
) -> list[int]:
    """The first layer of each group.

    A group depends on the layers before it only: those of the first K layers are these, cut at K.

    ``sizes``: elements of each layer's shard, in order; ``groupable``: whether its update may share
    a launch.
    """
    begins: list[int] = []
    most, taken, earlier = limits.first_elements, 0, 0
    limit = most
    for index, size in enumerate(sizes):
        taken += size
        if (
            not begins
            or index - begins[-1] == limits.most_layers
            or taken > limit
            or not (groupable[index] and groupable[index - 1])
        ):
            most = min(limits.most_elements, most * 2) if begins else most
            limit = max(most, int(limits.earlier_share * earlier))
            begins.append(index)
            taken = size
        earlier += size
    return begins
