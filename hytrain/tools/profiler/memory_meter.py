"""How much is allocated on a device, and the most that was since the last look."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CudaMeter:
    """The caching allocator's own books."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        """Bytes in use now."""
        return torch.cuda.memory_allocated(self._device)

    def take_peak(self) -> int:
        """Most bytes in use since the last call."""
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def watching(self) -> contextlib.AbstractContextManager[object]:
        """Nothing is to be done: the allocator always counts."""
        return contextlib.nullcontext()


class CpuMeter(TorchDispatchMode):
    """Results of torch's operations on a CPU, which has no such books; for trying without a GPU.

    What an operation allocates for itself is not seen.
    """

    def __init__(self, present: Iterable[torch.Tensor]) -> None:
        """Tensors that are there already are not counted."""
        super().__init__()
        self._bytes = 0
        self._peak = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in present}

    def allocated(self) -> int:
        """Bytes in use now."""
        return self._bytes

    def take_peak(self) -> int:
        """Most bytes in use since the last call."""
        peak, self._peak = self._peak, self._bytes
        return peak

    def watching(self) -> contextlib.AbstractContextManager[object]:
        """A mode in which each operation's results are counted."""
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The operation itself, its results counted."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._seen or size == 0:
            return
        self._seen.add(address)
        self._bytes += size
        self._peak = max(self._peak, self._bytes)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self._bytes -= size


MemoryMeter = CudaMeter | CpuMeter
"""Reads a device's allocator."""
