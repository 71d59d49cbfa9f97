"""What memory this rank may use, and what the steps need beside the optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hytrain.config import SolverConfig
from hytrain.hardware.gpu_memory import allocated_bytes, shares_host_memory, usable_gpu_bytes
from hytrain.hardware.host_share import HostShare
from hytrain.kernels.host_limits import host_memory_pools
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import buffer_bytes, gpu_reserve, host_reserve, state_bytes

LOOK_EVERY = 10
"""Steps between two looks at memory: asking takes tenths of a millisecond."""


def limits_within(solver: SolverConfig, gpu: int | None, gpu_base: int, host: int) -> MemoryLimits:
    """What a rank may use of this much memory before its first step."""
    return MemoryLimits(
        gpu=gpu,
        gpu_reserve=gpu_reserve(solver.gpu_memory_reserve_bytes, gpu or 0),
        gpu_base=gpu_base,
        host=host,
        host_reserve=host_reserve(solver.host_memory_reserve_bytes, host),
        host_base=solver.host_activation_bytes,
    )


class MemoryProbe:
    """Follows what is allocated on the GPU as backward goes down the layers.

    A sample is taken as each layer's gradient is handed over. What is neither state nor a gradient
    that waits on the GPU is the base that any placement needs: gradients on their way to the host
    are in it as far as every placement leaves them room.
    """

    def __init__(
        self, layers: Sequence[LayerBytes], device: torch.device, kept_in_flight: int = 0
    ) -> None:
        """``kept_in_flight``: bytes of gradients in flight that a placement has room for; others
        are waited for (:class:`~hytrain.offload.gradient_room.GradientRoom`).
        """
        self._layers = list(layers)
        self._kept_in_flight = kept_in_flight
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._at: dict[int, int] = {}
        self._gradients: dict[int, tuple[int, int]] = {}
        self._begin = 0
        self._peak = allocated_bytes(device)[1] if self._is_cuda else 0
        self.transient: int | None = None
        """Bytes that are allocated and freed between two samples, from when the peak last rose;
        None: it has not risen in a step yet, and nothing is known of them."""
        self.growth: int | None = None
        """The most bytes that a layer's backward has freed, which its forward had left to it; None
        before the first measurement."""
        self.base_at: tuple[int, ...] = ()
        """Bytes in use while each layer's backward runs, beside state and waiting gradients of
        GPU-placed layers; empty before the first measurement."""

    @property
    def wanted(self) -> bool:
        """Whether samples are of use here, since a query of the allocator takes a while."""
        return self._is_cuda

    def begin_backward(self) -> None:
        """The last micro-batch's backward begins."""
        self._at.clear()
        self._begin, _ = allocated_bytes(self._device)

    def gradient(self, index: int, waiting: int, in_flight: int) -> None:
        """A layer's gradient has been handed over.

        ``waiting``: bytes of gradients that wait for updates on the GPU; ``in_flight``: bytes of
        those that are on their way to the host.
        """
        self._at[index], _ = allocated_bytes(self._device)
        self._gradients[index] = waiting, in_flight

    def end_step(self, gpu_layers: int, moving_bytes: int) -> None:
        """Evaluates the step's samples, once all its gradients are there.

        ``moving_bytes``: state of layers that have left the GPU, not yet given back.
        """
        if len(self._at) != len(self._layers):
            return
        state = state_bytes(self._layers[:gpu_layers]) + moving_bytes
        state += buffer_bytes(self._layers, gpu_layers)  # planned for with the state
        transient = self._transient_bytes()
        base = [0] * len(self._layers)
        left, growth = self._begin - state, 0
        for index in reversed(range(len(self._layers))):
            waiting, in_flight = self._gradients[index]
            used = self._at[index] - state - waiting
            base[index] = max(0, used + transient - max(0, in_flight - self._kept_in_flight))
            growth = max(growth, left - (used - in_flight))
            left = used - in_flight
        self.growth = growth
        base[-1] = max(base[-1], self._begin + transient - state)
        self.base_at = tuple(base)
        self._at.clear()

    def _transient_bytes(self) -> int:
        """Bytes that forward, loss and a layer's backward allocate and free between two samples.

        They show only in the allocator's peak, which is the user's to reset. A peak that has not
        risen since the last look is an older step's, with more layers on the GPU, or not a step's.
        """
        _, peak = allocated_bytes(self._device)
        if peak > self._peak:
            self.transient = max(0, peak - max(self._begin, *self._at.values()))
        self._peak = peak
        return self.transient or 0

    def limits(
        self,
        solver: SolverConfig,
        gpu_base: int,
        host_held: int,
        share: HostShare,
        first_host: int | None = None,
    ) -> MemoryLimits:
        """The present limits.

        Args:
            solver: how much stays free.
            gpu_base: bytes known to be needed on the GPU before anything has been measured.
            host_held: host bytes that this rank's layers hold already.
            share: this rank's part of what the host has left.
            first_host: the limits' ``host`` before the first step; None: it has not begun. What is
                missing of it since then counts as activations that have been offloaded.
        """
        gpu = usable_gpu_bytes(self._device)
        host = share.memory(host_memory_pools()) + host_held
        shares_host = shares_host_memory(self._device)
        if shares_host:
            host += torch.cuda.memory_reserved(self._device)
        gone = 0 if first_host is None else max(0, first_host - host)
        limits = limits_within(solver, gpu, gpu_base, host)
        host_base = max(0, limits.host_base - gone)
        limits = replace(limits, host_base=host_base, shares_host=shares_host)
        return self.with_base(limits)

    def with_base(self, limits: MemoryLimits) -> MemoryLimits:
        """Replaces the base by what steps were last measured to need; does not query the driver."""
        if not self.base_at:
            return limits
        return replace(limits, gpu_base=max(self.base_at), gpu_base_at=self.base_at)
