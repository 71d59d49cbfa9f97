"""Registers host memory with the CUDA driver, so that copies run beside everything else."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch

from hytrain.kernels.host_limits import describe_free_memory

logger = logging.getLogger(__name__)

_MAX_REGISTER = 64 << 30
"""The most bytes per registration: very large ones fail on some drivers."""
_PROBE_BYTES = 32 << 20
_PROBE_COPIES = 3


class Pinning:
    """The registration of one mapping; without it copies are slower and block, but are correct."""

    def __init__(
        self, address: int, num_bytes: int, device: torch.device, purpose: str, *, pin: bool = True
    ) -> None:
        """
        Args:
            address: where the mapping begins, page-aligned.
            num_bytes: its size, in whole pages.
            device: the device whose copies use the memory; nothing is done for a CPU.
            purpose: what the memory is for, in the warning that it cannot be pinned.
            pin: if False, nothing is done.
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
                # The driver keeps the error, and torch would raise it at the next kernel, however
                # unrelated. This is the next kernel.
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)
                _warn(num_bytes, purpose, int(result), device)
                return
            self._registered.append(address + offset)

    def release(self) -> None:
        """Unregisters the memory. No copy may be in flight. May be called twice."""
        for address in self._registered:
            cast(Any, torch.cuda.cudart()).cudaHostUnregister(address)
        self._registered.clear()


_warned: set[torch.device] = set()


def _warn(num_bytes: int, purpose: str, result: int, device: torch.device) -> None:
    """Warns once per device: what failed and what it costs; pageable copies are correct."""
    if device in _warned:
        logger.info("%.2f GiB of host memory for %s are not pinned", num_bytes / 2**30, purpose)
        return
    _warned.add(device)
    logger.warning(
        "pinning %.2f GiB of host memory for %s failed (CUDA error %d): copies will be slower%s; "
        "check `ulimit -l` and the container's memory limit; host memory: %s (said once)",
        num_bytes / 2**30,
        purpose,
        result,
        measured_loss(device),
        describe_free_memory(),
    )


@cache
def measured_loss(device: torch.device) -> str:
    """Rates of copies to the host, in words; empty if they cannot be measured."""
    try:
        here = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
        pageable = copy_rate(torch.zeros(_PROBE_BYTES, dtype=torch.uint8), here)
    except (RuntimeError, MemoryError):
        return ""
    try:
        pinned = copy_rate(torch.zeros(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True), here)
    except RuntimeError:  # not even that little can be pinned
        return f" ({pageable / 1e9:.1f} GB/s measured)"
    return f" ({pageable / 1e9:.1f} GB/s measured, and {pinned / 1e9:.1f} from pinned memory)"


def copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes per second of the fastest of a few copies between a device and the host."""
    device = target.device if target.is_cuda else source.device
    seconds: list[float] = []
    for _ in range(_PROBE_COPIES + 1):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return source.nbytes / min(seconds[1:])  # the first touches pages
