"""Whether ranks that have not come to a collective can: two that wait for each other cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hytrain.comm.call_sites import WAITS_FOR_ALL, WAITS_FOR_SOURCE, Standing, sequence_here


def standings_of(histories: Mapping[int, Mapping[str, Any]]) -> dict[int, Standing]:
    """Where the ranks have said that they stand."""
    return {
        rank: Standing.unpacked(history["standing"])
        for rank, history in histories.items()
        if history.get("standing") is not None
    }


def never_comes(
    rank: int,
    behind: Sequence[int],
    histories: Mapping[int, Mapping[str, Any]],
    waited: float,
    *,
    global_rank: Callable[[int], int],
    group_name: str,
) -> str | None:
    """Says which rank cannot come to this rank's collective; None: all may.

    Args:
        rank: this one, which waits for the others on the host or the device.
        behind: ranks that have not come to its collective.
        histories: what all have published.
        waited: seconds for which this one has waited.
        global_rank: of the group's ranks.
        group_name: of the process group that this rank's collective belongs to.
    """
    standings = standings_of(histories)
    others = [other for other in histories if other != rank]
    # Where another one only computes, it may be what is waited for.
    if not all(_waits(histories[r], standings.get(r), 0.5 * waited) for r in others):
        return None
    for other in behind:
        standing = standings.get(other)
        if standing is None or standing.seconds < 0.5 * waited:
            continue
        if _waits_for(standing, global_rank(rank), group_name):
            return (
                f"Rank {other} has been in {standing}, and that waits for this rank: neither can "
                "go on. All ranks must come to such calls at the same place of their steps; where "
                "one rank alone uses the model's weights, as with 'if rank == 0: "
                "evaluate(model)', call engine.synchronize() on all ranks before"
            )
    return None


def _waits(history: Mapping[str, Any], standing: Standing | None, seconds: float) -> bool:
    in_own_call = standing is not None and standing.call is not None
    in_own_call = in_own_call and standing is not None and standing.seconds >= seconds
    return in_own_call or float(history.get("waited", 0.0)) >= seconds


def _waits_for(standing: Standing, me: int, group_name: str) -> bool:
    """Whether a call that a rank stands in ends only when this rank makes it, which it has not."""
    needs_me = (standing.call in WAITS_FOR_ALL and me in standing.ranks) or (
        standing.call in WAITS_FOR_SOURCE and standing.source == me
    )
    if not needs_me or standing.sequence is None:
        return False
    here = sequence_here(standing.group, standing.ranks)
    if here is None:
        return False
    # This rank may have begun its part without waiting for it (async_op). In the group of its own
    # collective the last one that it has begun is that one.
    return here < standing.sequence + (standing.group == group_name)
