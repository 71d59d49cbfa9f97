"""Which neighbours are updated together on the device. Plain data: plans count launches with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

_ROOM_SHARE = 0.5
"""A group with this share of the elements before it is updated when 1.5 times as long has passed as
all before it took. Forward comes to it when it has launched those, and need not wait if launching a
layer's forward takes 1.5 times as long as the layer's update."""
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """How much is updated together.

    Attributes:
        first_elements: the most elements of the first group. The next forward waits for a layer's
            whole launch: the first one is small, and each may be twice as large as the one before.
        most_elements: the most elements of any group.
        most_layers: the most layers of any group.
        alone_elements: a layer with more is updated alone: its launch costs little compared with
            its update, and the event behind that lets the next forward begin sooner.
        earlier_share: a group may always have this share of all elements before it.
    """

    first_elements: int = 16 << 20
    most_elements: int = 64 << 20
    most_layers: int = 8
    alone_elements: int = 32 << 20
    earlier_share: float = 0.0

    def leaving_room(self) -> GroupLimits:
        """Returns the limits for launch-bound steps: fewer groups.

        The next forward then comes after the updates anyway, even after large ones.
        """
        return replace(self, alone_elements=_NO_LIMIT, earlier_share=_ROOM_SHARE)


LIMITS = GroupLimits()

IN_FLIGHT = 2
"""Pieces of streamed state on the device: one comes or leaves while the other is updated."""
ONE_GROUP = GroupLimits(_NO_LIMIT, _NO_LIMIT, _NO_LIMIT, _NO_LIMIT)
"""Limits with which all neighbours that may share a launch are one group."""


def group_begins(
    sizes: Sequence[int], groupable: Sequence[bool], limits: GroupLimits = LIMITS
) -> list[int]:
    """The first layer of each group.

    A group depends only on the layers before it: the first K layers alone have the same groups, cut
    at K.

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
            or max(size, sizes[index - 1]) > limits.alone_elements
            or not (groupable[index] and groupable[index - 1])
        ):
            most = min(limits.most_elements, most * 2) if begins else most
            limit = max(most, int(limits.earlier_share * earlier))
            begins.append(index)
            taken = size
        earlier += size
    return begins
