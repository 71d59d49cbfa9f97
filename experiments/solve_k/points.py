"""Which numbers of GPU layers are measured, in which order, and how far predictions are off.

Plain data, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence


def up_and_down(numbers: Iterable[int]) -> list[int]:
    """Each number once: every second one going up, the others coming down.

    Neighbours are so measured far from each other in time, and a drift of the machine shows as a
    saw instead of a slope.
    """
    ordered = sorted(set(numbers))
    return [*ordered[::2], *ordered[1::2][::-1]]


def layers_of(fractions: Iterable[float], num_layers: int) -> list[int]:
    """The numbers of GPU layers that these fractions mean."""
    return [round(fraction * num_layers) for fraction in fractions]


def near(solved: int, offsets: Iterable[int], num_layers: int) -> list[int]:
    """The solved number and those around it, as far as there are such layers."""
    return [n for n in (solved + offset for offset in offsets) if 0 <= n <= num_layers]


def closed_form_layers(share: float, num_layers: int) -> int:
    """As the solver rounds it: halves up."""
    return math.floor(share * num_layers + 0.5)


def errors(predicted: Sequence[float], measured: Mapping[int, float]) -> dict[int, float]:
    """Predicted over measured step, less one, for every measured number of GPU layers."""
    return {n: predicted[n] / seconds - 1.0 for n, seconds in sorted(measured.items())}


def largest_error(found: Mapping[int, float]) -> tuple[int, float] | None:
    """Where a prediction is off by most, and its signed error; None where nothing was measured."""
    if not found:
        return None
    worst = max(found, key=lambda n: abs(found[n]))
    return worst, found[worst]
