"""Numbers of GPU layers for which one side turned out to have no memory, whatever was predicted."""

from __future__ import annotations

from dataclasses import replace

from hytrain.placement.memory import Bounds

RETRY_STEPS = 200
"""Steps after which a number of GPU layers that did not fit is tried again."""


class RefusedNumbers:
    """What does not fit until a later step."""

    def __init__(self) -> None:
        self._too_many: int | None = None
        self._too_many_until = 0
        self._too_few: int | None = None
        self._too_few_until = 0

    def forget(self) -> None:
        """Everything may be tried again."""
        self._too_many = self._too_few = None

    def refuse_more_than(self, most: int, step: int) -> int:
        """The GPU has no memory for more; returns the step from which on they are tried again."""
        self._too_many, self._too_many_until = most + 1, step + RETRY_STEPS
        return self._too_many_until

    def refuse_fewer_than(self, fewest: int, step: int) -> int:
        """The host has no memory for the rest; returns the step from which on it is tried again."""
        self._too_few, self._too_few_until = fewest - 1, step + RETRY_STEPS
        return self._too_few_until

    def restrict(self, allowed: Bounds, step: int) -> Bounds:
        """What is left of the numbers that are predicted to fit, at this step."""
        if self._too_many is not None and step >= self._too_many_until:
            self._too_many = None
        if self._too_many is not None:
            most = min(allowed.max_gpu_layers, self._too_many - 1)
            allowed = replace(allowed, max_gpu_layers=most)
        if self._too_few is not None and step >= self._too_few_until:
            self._too_few = None
        if self._too_few is not None:
            fewest = max(allowed.min_gpu_layers, self._too_few + 1)
            allowed = replace(allowed, min_gpu_layers=fewest)
        return allowed
