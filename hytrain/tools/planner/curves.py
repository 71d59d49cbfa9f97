"""A measured quantity against a size, interpolated, and extrapolated beyond the measured sizes."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field

from hytrain.errors import PlanError


@dataclass(frozen=True, slots=True)
class Table:
    """A quantity at some sizes, with straight lines between them.

    Below the first size it has the first value; above the last, the last line goes on, but never
    falls. With a single point it is proportional to the size.

    Attributes:
        points: (size, value), by ascending positive size.

    Raises:
        PlanError: no point, sizes that do not ascend, or a value that is negative or not finite.
    """

    points: tuple[tuple[float, float], ...]
    _sizes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        object.__setattr__(self, "_sizes", tuple(sizes))
        if not sizes or sizes[0] <= 0.0 or sizes != sorted(set(sizes)):
            raise PlanError(f"a table needs ascending positive sizes, got {sizes}")
        if not all(0.0 <= value < math.inf for _, value in self.points):
            raise PlanError(f"a table holds a value that is negative or not finite: {self.points}")

    def scaled(self, size: float, value: float = 1.0) -> Table:
        """Returns the table with all sizes times ``size`` and all values times ``value``."""
        return Table(tuple((size * x, value * y) for x, y in self.points))

    def at(self, size: float) -> float:
        """Returns the value at a size."""
        points = self.points
        first_size, first = points[0]
        if len(points) == 1:
            return first * size / first_size
        if size <= first_size:
            return first
        position = min(bisect.bisect_left(self._sizes, size, lo=1), len(points) - 1)
        (low_size, low), (high_size, high) = points[position - 1], points[position]
        slope = (high - low) / (high_size - low_size)
        if size > high_size:
            return high + max(0.0, slope) * (size - high_size)
        return low + slope * (size - low_size)


FREE = Table(((1.0, 0.0),))
"""A table of zeros: something that takes no time."""
