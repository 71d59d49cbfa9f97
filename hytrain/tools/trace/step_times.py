"""Where a step's time goes: its parts, which sum to it, and how much of each activity is hidden.

All times are unions of intervals. Of the time in a step in which any span of an activity runs,

- hidden is the part in which the GPU computes something else,
- exposed is the rest: the GPU computes nothing else meanwhile,
- blocking is the part of exposed in which the GPU is idle and the chain of what it waits for leads
  to this activity (:mod:`blockers`). A copy that runs beside the one that is waited for is exposed,
  but not blocking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from hytrain.tools.trace import causes
from hytrain.tools.trace.blockers import Blame, Blockers
from hytrain.tools.trace.intervals import EMPTY, Intervals, of_pairs, united
from hytrain.tools.trace.kinds import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    CPU_UPDATE,
    D2H,
    FORWARD,
    GPU_UPDATE,
    H2D,
    OTHER,
    RECOMPUTE,
)
from hytrain.tools.trace.spans import NONE, RankTrace, Step

COMPUTE_PARTS: Final = (FORWARD, BACKWARD, RECOMPUTE, OTHER, GPU_UPDATE)
PARTS: Final = (*COMPUTE_PARTS, *causes.CAUSES)
"""Parts of a step: at every moment exactly one. If compute overlaps, the first in this order."""

_BLOCKS: Final[Mapping[str, tuple[str, ...]]] = {
    CPU_UPDATE: (causes.CPU_ADAM, causes.CLIPPING),
    D2H: (D2H,),
    H2D: (H2D,),
    COMMUNICATION: (COMMUNICATION, causes.SLOW_RANK),
}
_PASSES: Final[Mapping[str, tuple[str, ...]]] = {
    FORWARD: (FORWARD,),
    BACKWARD: (BACKWARD, RECOMPUTE),
}
"""Activity -> its passes of compute; recomputation is part of backward."""
ACTIVITIES: Final = (FORWARD, BACKWARD, GPU_UPDATE, CPU_UPDATE, D2H, H2D, COMMUNICATION)


class Overlap(NamedTuple):
    """Nanoseconds of an activity; total is hidden + exposed, blocking a part of exposed."""

    total: int
    hidden: int
    exposed: int
    blocking: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of one rank's step goes."""

    step: Step
    parts: Mapping[str, int]
    """Nanoseconds of each of PARTS; they sum to the step."""
    activities: Mapping[str, Overlap]
    """Those of ACTIVITIES that the step has."""
    layers: Mapping[int, Mapping[str, Overlap]]
    """Layer -> activities."""
    idle: tuple[Blame, ...]
    """Every idle interval's causes, in order."""

    @property
    def busy(self) -> int:
        """Nanoseconds in which the GPU computes."""
        return sum(self.parts[part] for part in COMPUTE_PARTS)


def overlap(steps: Sequence[StepTimes], activity: str, layer: int | None = None) -> Overlap:
    """An activity's overlap, summed over the steps, for one layer or for all."""
    found = [one.activities if layer is None else one.layers.get(layer, {}) for one in steps]
    rows = [activities[activity] for activities in found if activity in activities]
    return Overlap(*(sum(column) for column in zip((0, 0, 0, 0), *rows, strict=True)))


def times_of(rank: RankTrace, blockers: Blockers) -> tuple[StepTimes, ...]:
    """The times of all steps of a rank."""
    computes = _compute_parts(rank)
    compute = rank[COMPUTE]
    spans = {
        activity: compute.select(np.isin(compute.detail, _PASSES[activity]))
        if activity in _PASSES
        else rank[activity]
        for activity in ACTIVITIES
    }
    layers = sorted({n for rows in spans.values() for n in set(rows.layer.tolist())} - {NONE})
    covered = {activity: rows.covered() for activity, rows in spans.items()}
    by_layer = {
        layer: {
            activity: rows.select(rows.layer == layer).covered() for activity, rows in spans.items()
        }
        for layer in layers
    }
    # What hides an activity: other compute than its own.
    others = {
        activity: united(
            computes[part]
            for part in COMPUTE_PARTS
            if part not in _PASSES.get(activity, (activity,))
        )
        for activity in ACTIVITIES
    }
    found: list[StepTimes] = []
    for step in rank.steps:
        idle = tuple(blockers.idle(step.begin, step.end))
        blocked = {
            activity: of_pairs((b.begin, b.end) for b in idle if b.cause in led_to)
            for activity, led_to in _BLOCKS.items()
        }
        found.append(
            StepTimes(
                step=step,
                parts=_parts(computes, idle, step),
                activities=_overlaps(covered, others, blocked, step),
                layers={n: _overlaps(by_layer[n], others, blocked, step) for n in layers},
                idle=idle,
            )
        )
    return tuple(found)


def _compute_parts(rank: RankTrace) -> dict[str, Intervals]:
    """The compute that belongs to each part; the parts are disjoint."""
    compute = rank[COMPUTE]
    parts = {
        part: compute.select(compute.detail == part).covered()
        for part in (FORWARD, BACKWARD, RECOMPUTE)
    }
    parts |= {OTHER: compute.covered(), GPU_UPDATE: rank[GPU_UPDATE].covered()}
    taken = EMPTY
    for part in COMPUTE_PARTS:
        parts[part], taken = parts[part] - taken, taken | parts[part]
    return parts


def _parts(computes: Mapping[str, Intervals], idle: Sequence[Blame], step: Step) -> dict[str, int]:
    parts = {part: computes[part].within(step.begin, step.end).length for part in COMPUTE_PARTS}
    for cause in causes.CAUSES:
        parts[cause] = sum(blame.length for blame in idle if blame.cause == cause)
    assert sum(parts.values()) == step.length, "parts of a step must sum to it"
    return parts


def _overlaps(
    covered: Mapping[str, Intervals],
    others: Mapping[str, Intervals],
    blocked: Mapping[str, Intervals],
    step: Step,
) -> dict[str, Overlap]:
    found: dict[str, Overlap] = {}
    for activity, intervals in covered.items():
        own = intervals.within(step.begin, step.end)
        if not len(own):
            continue
        hidden = (own & others[activity]).length
        blocking = (own & blocked[activity]).length if activity in blocked else 0
        found[activity] = Overlap(own.length, hidden, own.length - hidden, blocking)
    return found
