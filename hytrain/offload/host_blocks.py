"""Host memory for what leaves the device for a while: taken at once, kept for the next time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from hytrain.kernels.host_memory import PAGE, STATE_REMEDY
from hytrain.offload.arena import Arena

_ALIGNMENT = 64
_MOST_WASTE = 1.25
"""A kept block of more than so many times what is needed is given back instead."""
_REMEDY = (
    "offload less (the argument `include`), raise the limit of this process, or leave the state "
    "where it is"
)


class HostBlock:
    """One mapping, cut into tensors that own it: it goes when the last of them does."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        *,
        pin: bool,
        purpose: str,
        remedy: str = _REMEDY,
    ) -> None:
        """
        Args:
            num_bytes: exact number of bytes, rounded up to whole pages (at least one).
            device: whose copies use the memory.
            pin: whether to register it with the driver.
            purpose: what it is for, in an error or a warning.
            remedy: what the user can do where there is none.

        Raises:
            HostMemoryError: the mapping is refused.
        """
        user = device if pin else torch.device("cpu")
        self._arena = Arena(num_bytes, user, purpose=purpose, remedy=remedy)
        self.num_bytes = self._arena.num_bytes
        self._memory = self._arena.take_tensor(self.num_bytes)

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for each of the tensors, from the front: same shape, strides and dtype.

        ``tensors``: dense, as :func:`is_dense`; together at most :func:`block_bytes`.
        """
        found: list[torch.Tensor] = []
        at = 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            flat = with_own_storage(self._memory[at : at + size]).view(tensor.dtype)
            found.append(flat.as_strided(tensor.size(), tensor.stride()))
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        return found

    def close(self) -> None:
        """Unpins it. No copy may be in flight. Tensors that are still referred to stay readable."""
        self._arena.close()


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, 1-D. What is saved or sent of a tensor is all of its storage; and torch.save
    refuses tensors of two dtypes in one.
    """
    begin = tensor.storage_offset() * tensor.element_size()
    part = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(part)


def pinned_zeros(num_bytes: int, device: torch.device, purpose: str) -> torch.Tensor:
    """A block's memory, uint8, 1-D: unpinned when the tensor that is returned goes.

    No copy may be in flight then.

    Raises:
        HostMemoryError: there is none.
    """
    block = HostBlock(num_bytes, device, pin=True, purpose=purpose, remedy=STATE_REMEDY)
    (memory,) = block.cut([torch.empty(num_bytes, dtype=torch.uint8, device="meta")])
    weakref.finalize(memory, block.close).atexit = False  # the driver may be gone by then
    return memory


def block_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of a block that has memory for each of the tensors."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are all of a block of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class HostBlocks:
    """Blocks that are in use, and pinned ones that wait for the next time."""

    def __init__(self, device: torch.device, purpose: str) -> None:
        """``device``: whose copies use the memory; ``purpose``: what it is for, in an error or a
        warning.
        """
        self._device = device
        self._purpose = purpose
        self._used: list[tuple[HostBlock, bool]] = []
        """And whether it is to be kept."""
        self._kept: list[HostBlock] = []

    @property
    def num_bytes(self) -> int:
        """All bytes taken and not given back."""
        used = sum(block.num_bytes for block, _keep in self._used)
        return used + sum(block.num_bytes for block in self._kept)

    def take(self, tensors: Sequence[torch.Tensor], *, pin: bool) -> list[torch.Tensor]:
        """Memory for each of the tensors, of the same layout; contents are undefined.

        ``pin``: whether to pin the memory, and to keep it for the next time.

        Raises:
            HostMemoryError: the host has not that much; nothing has been taken.
        """
        needed = block_bytes(tensors)
        block = self._reuse(needed) if pin else None
        if block is None:
            block = HostBlock(needed, self._device, pin=pin, purpose=self._purpose)
        self._used.append((block, pin))
        return block.cut(tensors)

    def _reuse(self, needed: int) -> HostBlock | None:
        for block in sorted(self._kept, key=lambda block: block.num_bytes):
            if needed <= block.num_bytes <= max(needed * _MOST_WASTE, needed + PAGE):
                self._kept.remove(block)
                return block
        if self._kept:
            # What is being taken is of another size: kept as well, memory would grow for ever.
            self.close_kept()
        return None

    def give_back(self) -> None:
        """Nothing is used any more; pinned blocks are kept, as pinning takes longer than copies."""
        for block, keep in self._used:
            if keep:
                self._kept.append(block)
            else:
                block.close()
        self._used.clear()

    def close_kept(self) -> None:
        """Gives back what is kept."""
        if self._kept and self._device.type == "cuda":
            # Without this wait a copy from the block could still be in flight.
            torch.cuda.synchronize(self._device)
        for block in self._kept:
            block.close()
        self._kept.clear()

    def close(self) -> None:
        """Gives back everything; what tensors still own goes with them. May be called twice."""
        self.give_back()
        self.close_kept()
