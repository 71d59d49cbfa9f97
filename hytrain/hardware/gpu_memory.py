"""What memory a GPU has left for this process, and what torch's allocator has allocated."""

from __future__ import annotations

import torch


def usable_gpu_bytes(device: torch.device) -> int | None:
    """GPU memory that this process may take in total, including what it has; None without a GPU.

    The allocator's own limit (``torch.cuda.set_per_process_memory_fraction``) counts.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    usable = free + torch.cuda.memory_reserved(device)
    return min(usable, int(total * torch.cuda.get_per_process_memory_fraction(device)))


def shares_host_memory(device: torch.device) -> bool:
    """Whether a GPU has no memory of its own (DGX Spark): its bytes are the host's."""
    if device.type != "cuda":
        return False
    return bool(torch.cuda.get_device_properties(device).is_integrated)


_SPARE_SHARE = 0.5
"""Share of the free memory that is spare: a later step may need more than the steps so far."""


def spare_gpu_bytes(device: torch.device) -> int:
    """GPU memory that may be taken temporarily beside training; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    left = min(free, allowed - torch.cuda.memory_reserved(device))
    return max(0, int(_SPARE_SHARE * left))


_AMPLE_SHARE = 0.7
"""Share of the memory that this process may use: if no more is taken, gaps do no harm."""


def give_back_cached(device: torch.device, wanted: int) -> None:
    """Gives cached memory back, between steps, before ``wanted`` bytes are taken for many steps.

    Torch's allocator would rather split a block that it has cached than ask the driver. The block
    held activations and would hold them again in the next step, which then finds it too small: what
    is left of it is a gap. Between steps hardly anything is in use but what stays, so that memory
    taken after this is a segment of its own. If memory is plenty, nothing is given back: the next
    step would take it anew.
    """
    usable = usable_gpu_bytes(device)
    if usable is None:
        return
    if torch.cuda.memory_reserved(device) + wanted > _AMPLE_SHARE * usable:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes that torch's allocator has allocated on a GPU: now, and the most so far.

    ``torch.cuda.memory_allocated`` says the same, but names and sorts hundreds of statistics for
    it in Python: too much for autograd's thread, once a layer.
    """
    found = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return int(found["current"]), int(found["peak"])
