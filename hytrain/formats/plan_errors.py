"""What the planner refuses."""

from __future__ import annotations

import math

from hytrain.errors import HyTrainError


class PlanError(HyTrainError, ValueError):
    """A profile, a problem or a plan file that nothing can be decided from."""


def require_positive(what: str, **values: float) -> None:
    """Raises PlanError where a number is not positive and finite."""
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise PlanError(f"{what}: {name} must be positive, got {value}")
