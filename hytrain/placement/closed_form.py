"""The published closed form of the balance between backward and updates."""

from __future__ import annotations

import math

from hytrain.errors import PlacementError


def closed_form(t_backward: float, t_update: float, alpha: float) -> float:
    """The share of layers to update on the GPU, in [0, 1], as HyTrainDNN solves for it.

    From the balance ``t_B + t_Uk(gpu) = t_U - t_Uk(cpu)`` with ``t_Uk(cpu) = k * t_U`` and
    ``t_Uk(gpu) = alpha * k * t_U``::

        k = (t_U - t_B) / ((1 + alpha) * t_U), clamped to [0, 1]

    It leaves out copies, pipeline fill, unequal layers, memory and the overlap with the next
    forward pass; see :mod:`hytrain.cost.prediction` for what does not.

    Args:
        t_backward: seconds of the backward pass, t_B.
        t_update: seconds the CPU would need to update every layer, t_U; 0 gives 0.
        alpha: GPU over CPU update time of the same parameters.

    Raises:
        PlacementError: an argument is negative or not finite.
    """
    for name, value in (("t_backward", t_backward), ("t_update", t_update), ("alpha", alpha)):
        if not (math.isfinite(value) and value >= 0.0):
            raise PlacementError(f"{name} must be finite and not negative, got {value}")
    if t_update == 0.0:
        return 0.0
    return min(1.0, max(0.0, (t_update - t_backward) / ((1.0 + alpha) * t_update)))
