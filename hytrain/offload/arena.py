"""Host memory of an exact size, pinned for the device where there is one.

torch's pinned allocator rounds up to powers of two; gigabytes of gradients cannot afford that.
"""

from __future__ import annotations

import ctypes

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
            device: whose copies will read and write the memory.
            purpose: what it is for, in an error.
            remedy: what the user can do where there is none.
            as_taken: only the mapping is made at once; what is taken, in whole pages, is there and
                pinned from then on.

        Raises:
            HostMemoryError: the mapping is refused.
        """
        self.num_bytes = -(-max(num_bytes, 1) // PAGE) * PAGE
        with taking_host_memory(purpose, self.num_bytes, remedy=remedy):
            self._mapping = map_anonymous(self.num_bytes)
        # The export keeps the mapping open; close() must drop it before unmapping.
        self._export: ctypes.Array[ctypes.c_char] | None = (
            ctypes.c_char * self.num_bytes
        ).from_buffer(self._mapping)
        self.address = ctypes.addressof(self._export)
        self._taken = 0
        self._device = device
        self._purpose = purpose
        self._as_taken = as_taken
        self._pinnings: list[Pinning] = []
        if not as_taken:
            self._pin(self.address, self.num_bytes)

    def _pin(self, address: int, num_bytes: int) -> None:
        pinning = Pinning(address, num_bytes, self._device, self._purpose)
        self._pinnings.append(pinning)
        if not pinning.is_pinned:
            # As pinning would: memory that is not there is missed now, and not steps later, and a
            # build takes what was said of it.
            _C.touch(address, num_bytes, 1)

    @property
    def is_pinned(self) -> bool:
        """Whether all of the memory is registered with the driver."""
        return all(pinning.is_pinned for pinning in self._pinnings)

    def take(self, num_bytes: int, alignment: int = 64) -> int:
        """Address of the next ``num_bytes``.

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
        for pinning in self._pinnings:
            pinning.release()
        self._export = None
        self._mapping.close()
