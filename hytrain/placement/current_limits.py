"""The memory that this rank may use now; queried seldom, since a query takes the host a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hytrain.config import SolverConfig
from hytrain.hardware.host_share import HostShare
from hytrain.placement.costs import MemoryLimits
from hytrain.placement.memory_probe import LOOK_EVERY, MemoryProbe


class CurrentLimits:
    """Keeps the last answer until it is too old or known to be wrong."""

    def __init__(
        self,
        probe: MemoryProbe,
        solver: SolverConfig,
        first: MemoryLimits,
        host: HostShare,
        host_bytes: Callable[[], int],
    ) -> None:
        """
        Args:
            first: the limits before the first step.
            host: this rank's part of its host.
            host_bytes: returns how many bytes of the host this rank holds already.
        """
        self._probe = probe
        self._solver = solver
        self._first = first
        self._host = host
        self._host_bytes = host_bytes
        self._limits: MemoryLimits | None = None
        self._asked_at = 0

    def at(self, step: int) -> MemoryLimits:
        """The limits at this step."""
        if self._limits is None or step - self._asked_at >= LOOK_EVERY:
            self._asked_at = step
            first = self._first
            limits = self._probe.limits(
                self._solver, first.gpu_base, self._host_bytes(), self._host, first.host
            )
            self._limits = replace(limits, kept_gradients=first.kept_gradients)
        return self._limits

    def add_measured(self) -> None:
        """Adopts what the probe has measured in another step."""
        if self._limits is not None:
            self._limits = self._probe.with_base(self._limits)

    def forget(self) -> None:
        """Drops the last answer: state has moved, and free memory has changed."""
        self._limits = None
