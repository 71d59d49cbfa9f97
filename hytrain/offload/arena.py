"""Host memory of an exact size, pinned for the device if there is one.

torch's pinned allocator rounds up to powers of two; gigabytes of gradients cannot afford that.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from hytrain import _C
from hytrain.kernels.host_memory import PAGE, STATE_REMEDY, map_anonymous, taking_host_memory
from hytrain.offload.pinning import Pinning


class Arena:
    """One anonymous mapping, allocated from front to back, released as a whole."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        purpose: str = "weights and gradients",
        remedy: str = STATE_REMEDY,
        as_taken: bool = False,
    ) -> None:
        """Maps and, for a CUDA device, pins ``num_bytes``.

        Args:
            num_bytes: exact number of bytes, rounded up to whole pages (at least one).
            device: the device whose copies will read and write the memory.
            purpose: what it is for, in an error.
            remedy: what the user can do if there is none, in an error.
            as_taken: whether only the mapping is made at once; memory is committed and pinned when
                it is taken, in whole pages.

        Raises:
            HostMemoryError: the mapping is refused.
        """
        self.num_bytes = -(-max(num_bytes, 1) // PAGE) * PAGE
        with taking_host_memory(purpose, self.num_bytes, remedy=remedy):
            self._mapping: mmap.mmap | None = map_anonymous(self.num_bytes)
        self.address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
        self._taken = 0
        self._device = device
        self._purpose = purpose
        self._as_taken = as_taken
        self._pinnings: list[Pinning] = []
        # For garbage that a failed build leaves: pages that are unmapped while they are registered
        # stay taken. Not at exit: the driver may be gone by then.
        weakref.finalize(self, _release, self._pinnings).atexit = False
        if not as_taken:
            self._pin(self.address, self.num_bytes)

    def _pin(self, address: int, num_bytes: int) -> None:
        pinning = Pinning(address, num_bytes, self._device, self._purpose)
        self._pinnings.append(pinning)
        if not pinning.is_pinned:
            # As pinning would: missing memory shows now, and not steps later, and a build takes
            # as much as was predicted.
            _C.touch(address, num_bytes, 1)

    @property
    def is_pinned(self) -> bool:
        """Whether all of the memory is registered with the driver."""
        return all(pinning.is_pinned for pinning in self._pinnings)

    def take(self, num_bytes: int, alignment: int = 64) -> int:
        """Takes the next ``num_bytes`` and returns their address.

        Raises:
            MemoryError: more is taken than the arena was made for.
        """
        if self._as_taken:
            alignment = PAGE
            num_bytes = -(-num_bytes // PAGE) * PAGE
        start = -(-self._taken // alignment) * alignment
        if start + num_bytes > self.num_bytes:
            raise MemoryError(
                f"arena of {self.num_bytes} bytes cannot give {num_bytes} more after {start}"
            )
        self._taken = start + num_bytes
        if self._as_taken:
            self._pin(self.address + start, num_bytes)
        return self.address + start

    def take_tensor(self, num_bytes: int) -> torch.Tensor:
        """Takes the next ``num_bytes`` as a uint8 tensor, 1-D, which keeps the memory alive.

        Raises:
            MemoryError: see :meth:`take`.
        """
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        offset = self.take(num_bytes) - self.address
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes, offset=offset)

    def close(self) -> None:
        """Unpins the memory, and unmaps it unless a tensor keeps it. No copy may be in flight.

        May be called twice.
        """
        _release(self._pinnings)
        self._mapping = None


def _release(pinnings: list[Pinning]) -> None:
    for pinning in pinnings:
        pinning.release()
