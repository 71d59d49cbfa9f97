"""How the published searches deal layers to stages (Metis, USENIX ATC 2024; facts from its code).

Layers go by compute shares; where a stage has too little memory, shares move to those with room and
layers are dealt again. Nothing here is used by the exact search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ATTEMPTS = 3
"""That a strategy's layers are dealt, at most."""

_PARTS = 7
"""Of a layer, that are dealt one by one at first."""

_MOVES = 4
"""Of a layer to the stage with most room left, at most."""

_HELD_BACK = 0.9
"""Of the share that memory allows a stage that had too much."""


@dataclass(frozen=True)
class Dealt:
    """Layers dealt to the stages of a strategy."""

    partition: tuple[int, ...] | None
    """None where memory does not suffice; stages may be empty and layers lost, as published."""

    attempts: int
    """How often layers were dealt."""

    first_slack: tuple[float, ...]
    """MB that each stage had left at the first attempt; negative where memory was short."""

    slack: tuple[float, ...]
    """The same at the last one."""

    @property
    def failures(self) -> int:
        """Attempts that did not fit."""
        return self.attempts - (self.partition is not None)


def deal_layers(shares: Sequence[float], weights: Sequence[float]) -> tuple[int, ...]:
    """First layer of each stage and the end, by shares of the compute.

    Args:
        shares: of each stage; they sum to 1.
        weights: of each layer; they sum to 1.
    """
    if len(shares) == 1:
        return (0, len(weights))
    room = list(shares)
    held = _deal_parts(room, [weight / _PARTS for weight in weights])
    layers = [sorted(layer for layer, parts in own.items() if 2 * parts > _PARTS) for own in held]
    left = [
        share - (sum(weights[own[0] : own[-1] + 1]) if own else 0.0)
        for share, own in zip(shares, layers, strict=True)
    ]
    ends = [0]
    for own in _move_layers(layers, left, weights):
        ends.append(ends[-1] + len(own))
    return tuple(ends)


def _deal_parts(room: list[float], weights: Sequence[float]) -> list[dict[int, int]]:
    """Parts of layers to stages, each while it has room; ``room`` is what is left then.

    Args:
        room: of each stage.
        weights: of a part of each layer.

    Returns:
        How many parts of which layers each stage has.
    """
    count = len(weights) * _PARTS
    held: list[dict[int, int]] = [{} for _ in room]
    spans: list[tuple[int, int] | None] = [None for _ in room]
    skipped: list[int] = []
    part = 0
    for stage, own in enumerate(held[:-1]):
        start, left = part, room[stage]
        while part < count - 1 - _PARTS:
            layer = part // _PARTS
            part += 1
            if left <= weights[layer]:
                skipped.append(part - 1)
                break
            left -= weights[layer]
            own[layer] = own.get(layer, 0) + 1
        room[stage] = left
        taken = sum(own.values())
        spans[stage] = (start, start + taken - 1) if taken else None
    # The last stage takes a layer, and then what it has room for, from the end.
    end = count
    while end > part or (skipped and skipped[-1] == end - 1):
        if count - end >= _PARTS and room[-1] <= weights[(end - 1) // _PARTS]:
            break
        if end <= part:
            skipped.pop()
        end -= 1
        room[-1] -= weights[end // _PARTS]
        held[-1][end // _PARTS] = held[-1].get(end // _PARTS, 0) + 1
    spans[-1] = (end, count - 1)
    for rest in [*skipped, *range(part, end)]:
        stage, layer = _roomiest_between(room, spans, rest), rest // _PARTS
        room[stage] -= weights[layer]
        held[stage][layer] = held[stage].get(layer, 0) + 1
        low, high = spans[stage] or (rest, rest)
        spans[stage] = (min(low, rest), max(high, rest))
    return held


def _roomiest_between(
    room: Sequence[float], spans: Sequence[tuple[int, int] | None], part: int
) -> int:
    """Of the stages from the one just before a part to the one just after, that with most room."""
    before, after = 0, len(room) - 1
    highest, lowest = -1, float("inf")
    for stage, span in enumerate(spans):
        if span is None:
            continue
        if part > span[1] > highest:
            before, highest = stage, span[1]
        if part < span[0] < lowest:
            after, lowest = stage, span[0]
    return max(range(before, after + 1), key=room.__getitem__)


def _move_layers(
    layers: list[list[int]], left: list[float], weights: Sequence[float]
) -> list[list[int]]:
    """Layers of neighbours to the stage with most room, while that makes no stage's room larger."""
    kept, most = [list(own) for own in layers], max(left)
    for move in range(1, _MOVES + 1):
        stage = max(range(len(left)), key=left.__getitem__)
        beside = [i for i in (stage - 1, stage + 1) if 0 <= i < len(left)]
        near = min(beside, key=left.__getitem__)
        if len(kept[near]) != 1 and layers[near]:
            layer = layers[near].pop(-1 if near < stage else 0)
            layers[stage] = sorted([*layers[stage], layer])
            left[stage] -= weights[layer]
            left[near] += weights[layer]
        if max(left) > most or move == _MOVES:
            return kept
        kept, most = [list(own) for own in layers], max(left)
    return kept


def moved_shares(
    shares: Sequence[float], capacity: Sequence[float], demand: Sequence[float]
) -> list[float] | None:
    """Shares of the compute such that memory may suffice; None where it cannot.

    A stage short of memory keeps the part that fits, and a tenth less; the others take the rest in
    proportion to their shares, each up to what its memory allows.
    """
    adjusted, free, owed = [], [], 0.0
    for share, room, needed in zip(shares, capacity, demand, strict=True):
        fits = room > needed
        adjusted.append(share if fits else share * (room / needed) * _HELD_BACK)
        free.append(share * room / needed - share if fits else 0.0)
        owed += share - adjusted[-1]
    if sum(free) < owed:
        return None
    given = [0.0] * len(free)
    while owed > 0.01:
        total = sum(share for share, rest in zip(shares, free, strict=True) if rest > 0.001)
        if total == 0.0:
            return None
        ratios = [s / total if rest > 0.001 else 0.0 for s, rest in zip(shares, free, strict=True)]
        for stage, ratio in enumerate(ratios):
            taken = min(free[stage], owed * ratio)
            given[stage] += taken
            free[stage] -= taken
            owed -= taken
    return [extra + share for extra, share in zip(given, adjusted, strict=True)]
