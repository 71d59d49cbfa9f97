"""What a planner answers where nothing fits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Nothing fits, in words, and how much is missing.

    Attributes:
        reason: for people; names what is missing, and where.
        missing: GiB; 0 where it is not memory that is missing.
        is_close: it is not proven that nothing fits, but nothing was found.
        samples: of the batch, what the GPUs compute at most; 0 where these are not too many.
    """

    reason: str
    missing: float = 0.0
    is_close: bool = False
    samples: int = 0
