"""What device a rank has, and how a profile names it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from hytrain.errors import ConfigError
from hytrain.formats.profile_file import device_label
from hytrain.hardware.gpu_memory import usable_gpu_bytes
from hytrain.hardware.machine import cpu_model, usable_cores
from hytrain.kernels.host_limits import available_host_bytes

MULTIPROCESSORS_VARIABLE = "HYTRAIN_MULTIPROCESSORS"
"""Environment variable that says how many of its GPU's multiprocessors a rank may use."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A rank's device.

    Attributes:
        multiprocessors: multiprocessors (of a CPU: cores) that the process may use.
        limit_bytes: memory that the process is allowed, which does not change from day to day.
        memory_bytes: what of it the process can have now.
    """

    name: str
    multiprocessors: int
    limit_bytes: int
    memory_bytes: int

    @property
    def label(self) -> str:
        """The text that tells the device apart."""
        return device_label(self.name, self.multiprocessors, self.limit_bytes)


def device_facts(
    device: torch.device, *, multiprocessors: int | None = None, ranks_on_host: int = 1
) -> DeviceFacts:
    """Returns a device's facts; a CPU counts as a device, for trying things out.

    Args:
        device: a GPU or the CPU.
        multiprocessors: those that work on the current stream may use, if these are not all (green
            contexts), which torch cannot tell. None: what ``HYTRAIN_MULTIPROCESSORS`` says, else
            all of them.
        ranks_on_host: ranks that share a CPU's memory.
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
