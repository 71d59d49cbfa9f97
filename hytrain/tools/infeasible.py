"""A planner's answer if nothing fits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Why nothing fits, and how much is missing.

    Attributes:
        reason: for people; names what is missing, and where.
        missing: missing memory in GiB; 0 if something else is missing.
        is_close: nothing was found, but it is not proven that nothing fits.
        samples: most samples of the batch that the GPUs can compute; 0 if these are not the cause.
    """

    reason: str
    missing: float = 0.0
    is_close: bool = False
    samples: int = 0
