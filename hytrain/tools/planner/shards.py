"""Who keeps how much of the state. Plain numbers.

Splitting is Cephalo's: even; a GPU short of room hands its excess to those that have room. Here
the excess levels out (water-filling): the largest share is as small as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hytrain.errors import PlanError


def water_fill(rooms: Sequence[float], total: float) -> list[float]:
    """Shares that sum to the total: the same for all, or a member's room where that is less.

    Raises:
        PlanError: all rooms together are less than the total.
    """
    if math.fsum(rooms) < total:
        raise PlanError(f"{total} to be shared, but there is room for {math.fsum(rooms)} only")
    shares = [0.0] * len(rooms)
    left = total
    order = sorted(range(len(rooms)), key=lambda index: rooms[index])
    for position, index in enumerate(order):
        shares[index] = min(rooms[index], left / (len(order) - position))
        left -= shares[index]
    return shares
