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


ON_SEVERAL_RANKS = (
    "Other ranks may wait in a collective that this one has left: start the job again from a "
    "checkpoint. If a part of the model is run a varying number of times, its first backward must "
    "be one with the most"
)
"""What can be done about a gradient that came after its layer was taken for complete."""
WHERE_COMMITTED = (
    "Without clipping and overflow check some layers may have been committed: load a checkpoint "
    "with engine.load_checkpoint and repeat the step; the counts are learned anew"
)
"""The same, on one rank."""
