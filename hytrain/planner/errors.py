"""What the planner refuses."""

from __future__ import annotations

from hytrain.errors import HyTrainError


class PlanError(HyTrainError, ValueError):
    """A profile, a problem or a plan file that nothing can be decided from."""
