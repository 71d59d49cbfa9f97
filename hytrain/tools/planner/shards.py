"""Who keeps how much of the state, and where each layer is cut for it. Plain numbers.

Splitting is Cephalo's: even; a GPU short of room hands its excess to those that have room. Here
the excess levels out (water-filling): the largest share is as small as it can be.

Even collectives are the faster ones. So unequal shares are made by cutting as many layers as
possible evenly, and only the rest unevenly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hytrain.errors import PlanError

UNIT = 64
"""Elements. Every cut is a multiple, as in the partition table that training uses."""


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


def fill_units(rooms: Sequence[int], total: int) -> list[int]:
    """:func:`water_fill` in whole units; a unit that does not divide goes to an early member."""
    assert sum(rooms) >= total, "less room than units"
    shares = [0] * len(rooms)
    left = total
    # Of members with equal room, the last is served first, with the smaller half of what is left.
    order = sorted(range(len(rooms)), key=lambda index: (rooms[index], -index))
    for position, index in enumerate(order):
        shares[index] = min(rooms[index], left // (len(order) - position))
        left -= shares[index]
    assert left == 0, "the last member has room for what is left"
    return shares


def cut_layers(
    layer_sizes: Sequence[int], fractions: Sequence[float]
) -> tuple[tuple[int, ...], ...]:
    """A partition table that keeps as many layers evenly split as the fractions allow.

    Small layers first, a layer is split evenly among the ranks that are still below their quota.
    Every rank owns at least one unit of each layer: collectives and updates have no empty case.

    Args:
        layer_sizes: elements of each layer, multiples of ``UNIT`` * ranks (padded).
        fractions: what each rank shall own of the whole, positive, summing to 1.

    Returns:
        For each layer, ``ranks + 1`` ascending offsets from 0 to its size. A rank's total differs
        from its fraction by less than a unit, or by what owning a unit of each layer takes.

    Raises:
        PlanError: a fraction is not positive, they do not sum to 1, or a layer is not padded.
    """
    num_ranks = len(fractions)
    _check(layer_sizes, fractions)
    units = [size // UNIT for size in layer_sizes]
    left = _quotas(sum(units), fractions, len(units))
    shares: dict[int, list[int]] = {}
    order = sorted(range(len(units)), key=lambda index: (units[index], index))
    for position, layer in enumerate(order):
        # Kept back: a unit of each of the layers to come.
        later = len(order) - 1 - position
        rooms = [quota - later for quota in left]
        owned = fill_units([room - 1 for room in rooms], units[layer] - num_ranks)
        shares[layer] = [share + 1 for share in owned]
        left = [quota - share for quota, share in zip(left, shares[layer], strict=True)]
    return tuple(
        tuple(UNIT * cut for cut in itertools.accumulate(shares[layer], initial=0))
        for layer in range(len(units))
    )


def num_even(cuts: Sequence[Sequence[int]]) -> int:
    """Layers of which all ranks own equally much."""
    sizes = ({end - begin for begin, end in itertools.pairwise(row)} for row in cuts)
    return sum(len(different) == 1 for different in sizes)


def _check(layer_sizes: Sequence[int], fractions: Sequence[float]) -> None:
    if not all(fraction > 0.0 for fraction in fractions):
        raise PlanError(f"every rank owns a part of the state, but the fractions are {fractions}")
    if not math.isclose(math.fsum(fractions), 1.0, abs_tol=1e-6):
        raise PlanError(f"shard fractions sum to {math.fsum(fractions)}, not to 1")
    multiple = UNIT * len(fractions)
    bad = [size for size in layer_sizes if size < multiple or size % multiple]
    if bad:
        raise PlanError(f"layers must be padded to multiples of {multiple} elements, got {bad}")


def _quotas(units: int, fractions: Sequence[float], least: int) -> list[int]:
    """Whole units for each rank, at least ``least``: the nearest, by largest remainder."""
    exact = [fraction * units / math.fsum(fractions) for fraction in fractions]
    rooms = [max(least, math.floor(share)) for share in exact]
    while sum(rooms) > units:  # only where a rank was raised to the least
        able = [index for index, room in enumerate(rooms) if room > least]
        fullest = max(able, key=lambda index: rooms[index] - exact[index])
        excess = sum(rooms) - units
        rooms[fullest] -= min(excess, rooms[fullest] - least)
    by_remainder = sorted(range(len(exact)), key=lambda index: rooms[index] - exact[index])
    for index in itertools.islice(itertools.cycle(by_remainder), units - sum(rooms)):
        rooms[index] += 1
    return rooms
