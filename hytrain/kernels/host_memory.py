"""Anonymous host memory in huge pages, for gigabytes of state and of pinned gradients.

A pass over the state touches a new 4 KiB page every few nanoseconds: with 2 MiB pages the kernel
misses the TLB less, the first touch faults 512 times less often, and pinning is faster.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Generator
from contextlib import contextmanager

import torch

from hytrain import _C
from hytrain.errors import HostMemoryError, size_text
from hytrain.kernels.host_limits import describe_free_memory

PAGE = mmap.PAGESIZE

STATE_REMEDY = (
    'raise "hytrain.gpu_fraction" (or let it be "solve"), use more ranks, or a host with more '
    "memory"
)
"""What helps if there is not enough memory for optimizer state or its pinned gradients."""


@contextmanager
def taking_host_memory(
    purpose: str, num_bytes: int | None = None, *, remedy: str = STATE_REMEDY
) -> Generator[None]:
    """Context of allocations on the host: turns their failure into a MemoryError with advice.

    Args:
        purpose: what it is for, to follow "for".
        num_bytes: how much, if one number says it.
        remedy: what the user can do.

    Raises:
        HostMemoryError: there is not enough; in place of what torch, mmap or C++ raises.
    """
    try:
        yield
    except HostMemoryError:
        raise  # an inner call has said it with more detail
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_host_memory(error):
            raise
        size = "" if num_bytes is None else f" of {size_text(num_bytes)}"
        cause = str(error).partition("\n")[0] or type(error).__name__
        raise HostMemoryError(
            f"the host has no memory{size} for {purpose} ({cause}); "
            f"{describe_free_memory()}: {remedy}"
        ) from error


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether an error says that the host's memory is used up.

    False for a device's allocator, which raises a ``torch.OutOfMemoryError``.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError):  # Python's own, and std::bad_alloc out of an extension
        return True
    # torch has no type for it: its allocator says the first, its mapping of a file the second.
    return any(words in str(error) for words in ("DefaultCPUAllocator", "Cannot allocate memory"))


def return_freed() -> None:
    """Returns to the system freed memory that the C library (glibc) has kept.

    Loading a model leaves as much as its weights there, in pieces that nothing large fits into.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def map_anonymous(num_bytes: int, *, inherited: bool = False) -> mmap.mmap:
    """A private mapping of zeros, not backed before it is touched.

    Args:
        num_bytes: its length.
        inherited: forked children get it, as they must if users may hold it. Otherwise not:
            data loaders would copy page tables of gigabytes, and every page that the parent writes
            while they live.

    Raises:
        OSError: the mapping is refused.
    """
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice) and not (inherited and advice == "MADV_DONTFORK"):
            try:
                mapping.madvise(getattr(mmap, advice))
            except OSError:
                # A kernel built without it: correct all the same.
                continue
    return mapping


def host_zeros(
    numel: int,
    *,
    dtype: torch.dtype = torch.float32,
    purpose: str = "optimizer state",
    touch_threads: int = 0,
    inherited: bool = False,
    remedy: str = STATE_REMEDY,
) -> torch.Tensor:
    """A 1-D tensor of zeros; its memory goes back to the system when the tensor is freed.

    Args:
        numel: elements.
        dtype: their dtype.
        purpose: what it is for, in an error.
        touch_threads: threads that touch all of it now, each its own part; 0: its first use does.
        inherited: see :func:`map_anonymous`.
        remedy: what the user can do if there is no memory.

    Raises:
        HostMemoryError: the mapping is refused.
    """
    if numel == 0:
        return torch.zeros(0, dtype=dtype)
    num_bytes = -(-dtype.itemsize * numel // PAGE) * PAGE
    with taking_host_memory(purpose, num_bytes, remedy=remedy):
        mapping = map_anonymous(num_bytes, inherited=inherited)
    zeros = torch.frombuffer(mapping, dtype=dtype, count=numel)
    if touch_threads:
        _C.touch(zeros.data_ptr(), num_bytes, touch_threads)
    return zeros


def host_copy(tensor: torch.Tensor, dtype: torch.dtype, *, purpose: str) -> torch.Tensor:
    """A copy on the host, whose memory all goes back to the system when it is freed.

    malloc keeps what is freed in the arena of each thread, up to 64 MiB there, and gives small and
    large pieces the same: a few threads that copy tensors would keep hundreds of MiB.

    Args:
        tensor: on any device.
        dtype: the copy's dtype.
        purpose: what it is for, in an error.

    Raises:
        HostMemoryError: there is no memory for it.
    """
    copy = host_zeros(tensor.numel(), dtype=dtype, purpose=purpose)
    return copy.view(tensor.shape).copy_(tensor)
