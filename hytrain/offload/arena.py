"""Host memory of an exact size, pinned for the device where there is one.

torch's pinned allocator rounds up to powers of two; gigabytes of gradients cannot afford that.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import suppress
from typing import Any, cast

import torch

from hytrain.kernels.host_limits import describe_free_memory
from hytrain.kernels.host_memory import PAGE, STATE_REMEDY, map_anonymous, taking_host_memory

logger = logging.getLogger(__name__)

_MAX_REGISTER = 64 << 30
"""Bytes. Very large single registrations fail on some drivers."""


class Arena:
    """One anonymous mapping, allocated from front to back, released as a whole."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        purpose: str = "weights and gradients",
        remedy: str = STATE_REMEDY,
    ) -> None:
        """Maps and, for a CUDA device, pins ``num_bytes``.

        Args:
            num_bytes: exact number of bytes, rounded up to whole pages (at least one).
            device: whose copies will read and write the memory.
            purpose: what it is for, in an error.
            remedy: what the user can do where there is none.

        Raises:
            HostMemoryError: the mapping is refused.
        """
        self.num_bytes = -(-max(num_bytes, 1) // PAGE) * PAGE
        self._purpose = purpose
        with taking_host_memory(purpose, self.num_bytes, remedy=remedy):
            self._mapping = map_anonymous(self.num_bytes)
        # The export keeps the mapping open; close() must drop it before unmapping.
        self._export: ctypes.Array[ctypes.c_char] | None = (
            ctypes.c_char * self.num_bytes
        ).from_buffer(self._mapping)
        self.address = ctypes.addressof(self._export)
        self._taken = 0
        self._registered: list[int] = []
        if device.type == "cuda":
            self._pin(device)

    @property
    def is_pinned(self) -> bool:
        """Whether all of the memory is registered with the driver."""
        return bool(self._registered)

    def _pin(self, device: torch.device) -> None:
        runtime = cast(Any, torch.cuda.cudart())
        for offset in range(0, self.num_bytes, _MAX_REGISTER):
            length = min(_MAX_REGISTER, self.num_bytes - offset)
            result = runtime.cudaHostRegister(self.address + offset, length, 0)
            if int(result) != 0:
                self._unpin()
                # The driver keeps the error, and torch would raise it at the next kernel, whose it
                # is not. This is the next kernel.
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)
                # Copies from pageable memory block the worker but stay correct.
                logger.warning(
                    "pinning %.2f GiB of host memory for %s failed (CUDA error %s): copies will be "
                    "slower; check `ulimit -l` and the container's memory limit; host memory: %s",
                    self.num_bytes / 2**30,
                    self._purpose,
                    int(result),
                    describe_free_memory(),
                )
                return
            self._registered.append(self.address + offset)

    def _unpin(self) -> None:
        for address in self._registered:
            cast(Any, torch.cuda.cudart()).cudaHostUnregister(address)
        self._registered.clear()

    def take(self, num_bytes: int, alignment: int = 64) -> int:
        """Address of the next ``num_bytes``.

        Raises:
            MemoryError: more is taken than the arena was made for.
        """
        start = -(-self._taken // alignment) * alignment
        if start + num_bytes > self.num_bytes:
            raise MemoryError(
                f"arena of {self.num_bytes} bytes cannot give {num_bytes} more after {start}"
            )
        self._taken = start + num_bytes
        return self.address + start

    def take_tensor(self, num_bytes: int) -> torch.Tensor:
        """The next ``num_bytes`` as a uint8 tensor, 1-D, not to be used after :meth:`close`.

        Raises:
            MemoryError: as :meth:`take`.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        memory = (ctypes.c_char * num_bytes).from_address(self.take(num_bytes))
        return torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Unpins and unmaps. No copy may be in flight. May be called twice."""
        if self._export is None:
            return
        self._unpin()
        self._export = None
        self._mapping.close()
