"""Host memory for tensors that leave the device temporarily: taken in one block, then reused."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from hytrain.kernels.host_memory import PAGE, STATE_REMEDY
from hytrain.offload.arena import Arena

_ALIGNMENT = 64
_MOST_WASTE = 1.25
"""A kept block of more than this many times the needed size is given back instead."""
_REMEDY = (
    "offload less (the argument `include`), raise the limit of this process, or leave the state "
    "where it is"
)


class HostBlock:
    """One mapping, cut into tensors that own it: it is freed with the last of them."""

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
            device: the device whose copies use the memory.
            pin: whether to register it with the driver.
            purpose: what it is for, in an error or a warning.
            remedy: what the user can do if there is none, in an error.

        Raises:
            HostMemoryError: the mapping is refused.
        """
        user = device if pin else torch.device("cpu")
        self._arena = Arena(num_bytes, user, purpose=purpose, remedy=remedy)
        self.num_bytes = self._arena.num_bytes
        self._memory = self._arena.take_tensor(self.num_bytes)

    def cut(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for each of the tensors, from the front: same shape, strides and dtype.

        ``tensors``: dense, see :func:`is_dense`; their :func:`block_bytes` fit into the block.
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
        """Unpins the memory. No copy may be in flight. Tensors that are still in use stay valid."""
        self._arena.close()


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory, 1-D, as a storage of its own.

    Saving or sending a tensor takes all of its storage, and torch.save refuses tensors of two
    dtypes in one.
    """
    begin = tensor.storage_offset() * tensor.element_size()
    part = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(part)


def pinned_zeros(num_bytes: int, device: torch.device, purpose: str) -> torch.Tensor:
    """Returns a block's memory, uint8, 1-D, which is unpinned when the returned tensor is freed.

    No copy may be in flight then.

    Raises:
        HostMemoryError: there is not enough memory.
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
    """Whether the tensor's elements fill a block of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class HostBlocks:
    """Blocks that are in use, and pinned ones that are kept for reuse."""

    def __init__(self, device: torch.device, purpose: str) -> None:
        """``device``: whose copies use the memory; ``purpose``: what it is for, in an error or a
        warning.
        """
        self._device = device
        self._purpose = purpose
        self._used: list[tuple[HostBlock, bool]] = []
        """Each block, and whether it is to be kept."""
        self._kept: list[HostBlock] = []

    @property
    def num_bytes(self) -> int:
        """All bytes taken and not given back."""
        used = sum(block.num_bytes for block, _keep in self._used)
        return used + sum(block.num_bytes for block in self._kept)

    def take(self, tensors: Sequence[torch.Tensor], *, pin: bool) -> list[torch.Tensor]:
        """Takes memory for each of the tensors, of the same layout; contents are undefined.

        ``pin``: whether to pin the memory, and to keep it for reuse.

        Raises:
            HostMemoryError: the host does not have that much; nothing has been taken.
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
            # The new block has another size: if both were kept, memory would grow without end.
            self.close_kept()
        return None

    def give_back(self) -> None:
        """Takes all blocks out of use; pinned ones are kept: pinning takes longer than copying."""
        for block, keep in self._used:
            if keep:
                self._kept.append(block)
            else:
                block.close()
        self._used.clear()

    def close_kept(self) -> None:
        """Gives back the blocks that are kept."""
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
