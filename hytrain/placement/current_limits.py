"""What this rank may use of memory now; asked for seldom, since asking takes the host a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hytrain.config import SolverConfig
from hytrain.hardware.host_share import HostShare
from hytrain.placement.costs import MemoryLimits
from hytrain.placement.memory_probe import LOOK_EVERY, MemoryProbe


class CurrentLimits:
    """The last answer, until it is too old or known to be wrong."""

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
            first: what there was before the first step.
            host: this rank's part of its host.
            host_bytes: gives what this rank holds of the host already.
        """
        self._probe = probe
        self._solver = solver
        self._first = first
        self._host = host
        self._host_bytes = host_bytes
        self._limits: MemoryLimits | None = None
        self._asked_at = 0

    def at(self, step: int) -> MemoryLimits:
        """What there is at this step."""
        if self._limits is None or step - self._asked_at >= LOOK_EVERY:
            self._asked_at = step
            first = self._first
            limits = self._probe.limits(
                self._solver, first.gpu_base, self._host_bytes(), self._host, first.host
            )
            self._limits = replace(limits, kept_gradients=first.kept_gradients)
        return self._limits

    def add_measured(self) -> None:
        """The probe has seen another step."""
        if self._limits is not None:
            self._limits = self._probe.with_base(self._limits)

    def forget(self) -> None:
        """State has moved: there is more or less than there was."""
        self._limits = None
