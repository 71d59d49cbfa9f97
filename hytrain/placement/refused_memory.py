"""Leaves alone for a while what found no memory, although it should have fitted."""

from __future__ import annotations

from dataclasses import replace

from hytrain.placement.backoff import Backoff
from hytrain.placement.memory import Bounds


class RefusedMemory:
    """Numbers of GPU layers that either side had no memory for, and changes of form."""

    def __init__(self, num_layers: int) -> None:
        self._most, self._gpu = num_layers, Backoff()
        self._fewest, self._host = 0, Backoff()
        self._forms = Backoff()

    def refuse_more_than(self, gpu_layers: int, step: int) -> int:
        """Notes that the GPU has no memory for more; returns the step from which to retry."""
        self._most = gpu_layers
        return self._gpu.fail(step)

    def refuse_fewer_than(self, gpu_layers: int, step: int) -> int:
        """Notes that the host has no memory for the rest; returns the step from which to retry."""
        self._fewest = gpu_layers
        self._forms.fail(step)
        return self._host.fail(step)

    def refuse_forms(self, step: int) -> int:
        """Notes that a layer could not change its form; returns the step from which to retry."""
        return self._forms.fail(step)

    def allows_forms(self, step: int) -> bool:
        """Whether layers on the CPU may change their form at this step."""
        return self._forms.is_over(step)

    def within(self, fitting: Bounds, step: int) -> Bounds:
        """The numbers among those that fit that may be tried at this step."""
        if not self._gpu.is_over(step):
            fitting = replace(fitting, max_gpu_layers=min(fitting.max_gpu_layers, self._most))
        if not self._host.is_over(step):
            fitting = replace(fitting, min_gpu_layers=max(fitting.min_gpu_layers, self._fewest))
        return fitting
