"""What device a rank has, how a profile names it, and what memory it has left."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from hytrain.errors import ConfigError
from hytrain.formats.profile_file import device_label
from hytrain.hardware.machine import cpu_model, usable_cores
from hytrain.kernels.host_limits import available_host_bytes

MULTIPROCESSORS_VARIABLE = "HYTRAIN_MULTIPROCESSORS"
"""Environment variable that says how many multiprocessors a rank may use of its GPU's."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A rank's device.

    Attributes:
        multiprocessors: that the process may use.
        limit_bytes: memory that the process is allowed, which does not change from day to day.
        memory_bytes: of it, what the process can have now.
    """

    name: str
    multiprocessors: int
    limit_bytes: int
    memory_bytes: int

    @property
    def label(self) -> str:
        """What it is told apart by."""
        return device_label(self.name, self.multiprocessors, self.limit_bytes)


def device_facts(
    device: torch.device, *, multiprocessors: int | None = None, ranks_on_host: int = 1
) -> DeviceFacts:
    """Facts of a device; a CPU counts as one for trying.

    Args:
        device: a GPU or the CPU.
        multiprocessors: that work on the current stream may use, where these are not all of them
            (green contexts), which torch cannot tell. None: what ``HYTRAIN_MULTIPROCESSORS`` says,
            else all of them.
        ranks_on_host: that share a CPU's memory.
    """
    multiprocessors = multiprocessors or _told_multiprocessors()
    if device.type != "cuda":
        return DeviceFacts(
            name=f"CPU {cpu_model()}",
            multiprocessors=multiprocessors or usable_cores(),
            limit_bytes=psutil.virtual_memory().total // ranks_on_host,
            memory_bytes=available_host_bytes() // ranks_on_host,
        )
    properties = torch.cuda.get_device_properties(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    memory = usable_gpu_bytes(device)
    assert memory is not None
    return DeviceFacts(
        name=properties.name,
        multiprocessors=multiprocessors or properties.multi_processor_count,
        limit_bytes=int(properties.total_memory * fraction),
        memory_bytes=memory,
    )


def _told_multiprocessors() -> int | None:
    text = os.environ.get(MULTIPROCESSORS_VARIABLE, "")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{MULTIPROCESSORS_VARIABLE} is {text!r}: give a number above 0")
    return int(text)


def usable_gpu_bytes(device: torch.device) -> int | None:
    """GPU memory that this process may take in all, with what it has; None without a GPU.

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
"""Of the free memory: a later step of training may need more than the steps so far."""


def spare_gpu_bytes(device: torch.device) -> int:
    """GPU memory that may be taken for a while beside training; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    left = min(free, allowed - torch.cuda.memory_reserved(device))
    return max(0, int(_SPARE_SHARE * left))


_AMPLE_SHARE = 0.7
"""Of the memory that this process may use: where no more is taken, gaps do no harm."""


def give_back_cached(device: torch.device, wanted: int) -> None:
    """To be called between steps, before so many bytes are taken that stay for many of them.

    Torch's allocator would rather split a block that it has cached than ask the driver. The block
    was activations' and is theirs again in the next step, which then finds it too small: what is
    left of it is a gap. Nearly nothing but what stays is in use between steps, so that memory
    taken now is a segment of its own. Where there is plenty nothing is given back: the next step
    would take it anew.
    """
    usable = usable_gpu_bytes(device)
    if usable is None:
        return
    if torch.cuda.memory_reserved(device) + wanted > _AMPLE_SHARE * usable:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """What torch's allocator has allocated on a GPU: now, and the most so far.

    ``torch.cuda.memory_allocated`` says the same, but names and sorts hundreds of statistics for
    it in Python: too much for autograd's thread, once a layer.
    """
    found = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return int(found["current"]), int(found["peak"])
