"""What memory a GPU has left for this process, and what torch's allocator has allocated."""

from __future__ import annotations

import torch


def usable_gpu_bytes(device: torch.device) -> int | None:
    """GPU memory that this process may take in all, with what it has; None without a GPU.

    The allocator's own limit (``torch.cuda.set_per_process_memory_fraction``) counts.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    usable = free + torch.cuda.memory_reserved(device)
    return min(usable, int(total * torch.cuda.get_per_process_memory_fraction(device)))


_SPARE_SHARE = 0.5
"""Of the free memory: a later step of training may need more than the steps so far."""


def spare_gpu_bytes(device: torch.device) -> int:
    """GPU memory that may be taken for a while beside training; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    left = min(free, allowed - torch.cuda.memory_reserved(device))
    return max(0, int(_SPARE_SHARE * left))


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """What torch's allocator has allocated on a GPU: now, and the most so far.

    ``torch.cuda.memory_allocated`` says the same, but names and sorts hundreds of statistics for
    it in Python: too much for autograd's thread, once a layer.
    """
    found = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return int(found["current"]), int(found["peak"])
