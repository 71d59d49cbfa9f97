"""What a backward teaches about the order of gradients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FiringRecord:
    """What the first backward taught, the same on all ranks: layers' order, who may go early."""

    order: list[int]
    early: list[bool]


Firings = list[list[int]]
"""For each layer and parameter, how often its hook fires for one micro-batch."""


@dataclass(frozen=True, slots=True)
class LatePolicy:
    """What follows a gradient that came after its layer was taken for complete.

    Attributes:
        relearn: whether the next backward learns the counts anew. It is a collective: ranks that
            did not fail would not join it.
        advice: what the user can do; the end of the error.
    """

    relearn: bool
    advice: str


def late_policy(world_size: int, *, direct: bool) -> LatePolicy:
    """What can be done with so many ranks, where updates are committed directly or not."""
    if world_size > 1:
        return LatePolicy(
            relearn=False,
            advice="Other ranks may wait in a collective that this one has left: start the job "
            "again from a checkpoint. If the model uses the parameter a varying number of times, "
            "its first backward must be one with the most uses; if the losses of several forwards "
            "are added up now and then, they must not be run back one after the other before",
        )
    if direct:
        return LatePolicy(
            relearn=True,
            advice="Without clipping and overflow check some layers may have been committed: load "
            "a checkpoint with engine.load_checkpoint and repeat the step; the counts are learned "
            "anew",
        )
    return LatePolicy(
        relearn=True,
        advice="Nothing was committed. If the model uses the parameter a varying number of times, "
        "call engine.forward again and repeat the step: the counts are learned anew",
    )
