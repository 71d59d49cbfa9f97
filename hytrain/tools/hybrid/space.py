"""The space of plans, in parts that are searched one after another.

With S stages each group has at least ``max(N // S, S // N) * variance`` GPUs, and a power of two:
stage counts with the same least power of two make a size class. In a class every rank at which a
stage starts is a multiple of the class's least group, the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from hytrain.tools.hybrid.problem import Problem


@dataclass(frozen=True)
class SizeClass:
    """Stage counts with the same least group."""

    unit: int
    """GPUs of the least group."""

    units: int
    """Units of the cluster."""

    fewest: int
    """Fewest stages."""

    most: int

    @property
    def excess(self) -> int:
        """Most units that all groups together have beyond one each."""
        return self.units - self.fewest

    @property
    def shapes(self) -> list[int]:
        """Possible sizes of a group, in units."""
        return [1 << bit for bit in range((self.excess + 1).bit_length())]


def least_group(problem: Problem, stages: int) -> int:
    """Returns the least number of GPUs of a group."""
    least = max(problem.num_gpus // stages, stages // problem.num_gpus) * problem.variance
    return 1 << max(0, math.ceil(math.log2(least))) if least > 0 else 1


def size_classes(problem: Problem) -> list[SizeClass]:
    """Returns the classes that have a plan, by descending unit."""
    counts: dict[int, list[int]] = {}
    for stages in range(1, min(problem.num_gpus, problem.num_layers) + 1):
        counts.setdefault(least_group(problem, stages), []).append(stages)
    found: list[SizeClass] = []
    for unit, stages in counts.items():
        units, rest = divmod(problem.num_gpus, unit)
        most = min(max(stages), units)
        if rest == 0 and min(stages) <= most:
            found.append(SizeClass(unit, units, min(stages), most))
    return found


def orders(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Returns all orders of the device types; ascending by name."""
    return permutations(device.name for device in problem.devices)


def micro_batch_counts(problem: Problem) -> list[int]:
    """Returns the divisors of the batch, ascending."""
    return [count for count in range(1, problem.gbs + 1) if problem.gbs % count == 0]
