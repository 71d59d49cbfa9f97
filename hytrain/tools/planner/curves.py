"""A measured quantity against a size: what was measured, and how it goes on beyond it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hytrain.errors import PlanError

_GROWTH_POINTS = 5


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity against a micro-batch size: the measured value, else a straight line.

    Attributes:
        measured: at sizes 1, 2, ...; may be empty.
        slope: of the line, per sample.
        intercept: of the line, at size 0.

    Raises:
        PlanError: a number is not finite, or a measured value is negative.
    """

    measured: tuple[float, ...]
    slope: float
    intercept: float

    def __post_init__(self) -> None:
        numbers = (*self.measured, self.slope, self.intercept)
        if not all(math.isfinite(number) for number in numbers):
            raise PlanError(f"a profile holds a number that is not finite: {numbers}")
        if any(value < 0.0 for value in self.measured):
            raise PlanError(f"a profile holds a negative value: {self.measured}")

    def at(self, size: int) -> float:
        """The value at a size, which is at least 1."""
        if size <= len(self.measured):
            return self.measured[size - 1]
        return self.slope * size + self.intercept

    def upto(self, size: int) -> npt.NDArray[np.float64]:
        """The values at sizes 1..size."""
        return np.array([self.at(number) for number in range(1, size + 1)], dtype=np.float64)

    def plus(self, constant: float) -> Curve:
        """The same, higher by a constant."""
        raised = tuple(value + constant for value in self.measured)
        return Curve(raised, self.slope, self.intercept + constant)

    @staticmethod
    def grown(measured: Sequence[float]) -> Curve:
        """Beyond its end a list goes on by its mean growth over the last five values.

        So Cephalo continues a profile of peak memory. Of one value the growth is that from nothing.
        """
        if not measured:
            raise PlanError("a profile without a single value")
        points = min(_GROWTH_POINTS, len(measured))
        before = 0.0 if points == 1 else measured[-points]
        slope = (measured[-1] - before) / max(points - 1, 1)
        return Curve(tuple(measured), slope, measured[-1] - slope * len(measured))


@dataclass(frozen=True, slots=True)
class Table:
    """A quantity at some sizes, straight lines between them.

    Below the first size it is that of the first; above the last, the last line goes on, but never
    falls. One point alone is proportional to the size.

    Attributes:
        points: (size, value), by ascending positive size.

    Raises:
        PlanError: no point, sizes that do not ascend, or a value that is not a positive number.
    """

    points: tuple[tuple[float, float], ...]
    _sizes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        object.__setattr__(self, "_sizes", tuple(sizes))
        if not sizes or sizes[0] <= 0.0 or sizes != sorted(set(sizes)):
            raise PlanError(f"a table needs ascending positive sizes, got {sizes}")
        if not all(0.0 <= value < math.inf for _, value in self.points):
            raise PlanError(f"a table holds a value that is no positive number: {self.points}")

    def at(self, size: float) -> float:
        """The value at a size."""
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
