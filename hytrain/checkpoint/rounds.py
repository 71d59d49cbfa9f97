"""Who writes which parameter, and when: every rank about as much, one parameter at a time."""

from __future__ import annotations

from collections.abc import Sequence

from hytrain.checkpoint.gather import Delivery, ParameterPlace


def assign_writers(owned: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Which rank writes each parameter: balanced by size, and near the data where that is free.

    Args:
        owned: for each parameter, the elements of it that each rank owns.
        num_ranks: ranks that write.

    Returns:
        A rank for each parameter; the same on all ranks, since only the arguments decide.
    """
    sizes = [sum(parts) for parts in owned]
    writers = [0] * len(sizes)
    loads = [0] * num_ranks
    target = sum(sizes) / num_ranks
    # Large ones first: what is left to even out at the end is small.
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        by_ownership = sorted(range(num_ranks), key=lambda r: (-owned[index][r], loads[r], r))
        fitting = [rank for rank in by_ownership if loads[rank] + sizes[index] <= target]
        lightest = min(range(num_ranks), key=lambda r: (loads[r], -owned[index][r], r))
        writers[index] = fitting[0] if fitting else lightest
        loads[writers[index]] += sizes[index]
    return writers


def plan_rounds(places: Sequence[ParameterPlace], num_ranks: int) -> list[list[Delivery]]:
    """Rounds in which every rank gets at most one parameter, of about the same size for all."""
    owned = [[0] * num_ranks for _ in places]
    for parts, place in zip(owned, places, strict=True):
        for piece in place.pieces:
            parts[piece.rank] = piece.end - piece.begin
    writers = assign_writers(owned, num_ranks)
    queues: list[list[ParameterPlace]] = [[] for _ in range(num_ranks)]
    for place, writer in zip(places, writers, strict=True):
        queues[writer].append(place)
    for queue in queues:
        queue.sort(key=lambda place: -place.numel)
    return [
        [Delivery(queue[turn], rank) for rank, queue in enumerate(queues) if turn < len(queue)]
        for turn in range(max(map(len, queues), default=0))
    ]
