"""Registers host memory with the CUDA driver, so that copies run beside everything else."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, cast

import torch

from hytrain.kernels.host_limits import describe_free_memory

logger = logging.getLogger(__name__)

_MAX_REGISTER = 64 << 30
"""Bytes. Very large single registrations fail on some drivers."""


class Pinning:
    """The registration of one mapping; without it copies are slower and block, but correct."""

    def __init__(
        self, address: int, num_bytes: int, device: torch.device, purpose: str, *, pin: bool = True
    ) -> None:
        """
        Args:
            address: where the mapping begins, at a page.
            num_bytes: whole pages.
            device: whose copies use the memory; nothing is done for a CPU.
            purpose: what the memory is for, in the warning that it cannot be pinned.
            pin: False: nothing is done.
        """
        self._registered: list[int] = []
        if pin and device.type == "cuda":
            self._register(address, num_bytes, device, purpose)

    @property
    def is_pinned(self) -> bool:
        """Whether all of the memory is registered with the driver."""
        return bool(self._registered)

    def _register(self, address: int, num_bytes: int, device: torch.device, purpose: str) -> None:
        runtime = cast(Any, torch.cuda.cudart())
        for offset in range(0, num_bytes, _MAX_REGISTER):
            length = min(_MAX_REGISTER, num_bytes - offset)
            result = runtime.cudaHostRegister(address + offset, length, 0)
            if int(result) != 0:
                self.release()
                # The driver keeps the error, and torch would raise it at the next kernel, whose it
                # is not. This is the next kernel.
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)
                # Copies from pageable memory block the worker but stay correct.
                logger.warning(
                    "pinning %.2f GiB of host memory for %s failed (CUDA error %s): copies will be "
                    "slower; check `ulimit -l` and the container's memory limit; host memory: %s",
                    num_bytes / 2**30,
                    purpose,
                    int(result),
                    describe_free_memory(),
                )
                return
            self._registered.append(address + offset)

    def release(self) -> None:
        """Unregisters it. No copy may be in flight. May be called twice."""
        for address in self._registered:
            cast(Any, torch.cuda.cudart()).cudaHostUnregister(address)
        self._registered.clear()
