"""What placement refuses."""

from __future__ import annotations

from hytrain.errors import HyTrainError


class PlacementError(HyTrainError, ValueError):
    """Costs, bounds or a record that no decision can be made from."""


class MemoryBudgetError(PlacementError):
    """No split of the optimizer state fits; nothing was allocated. The text has the table."""
