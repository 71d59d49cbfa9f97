"""Where `hytrain profile` runs: one process, or the ranks that a launcher has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist

from hytrain.errors import ConfigError


def local_device() -> torch.device:
    """This rank's GPU, or the CPU where there is none.

    Raises:
        ConfigError: the host has fewer GPUs than ranks.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {local} of this host has no GPU of its own: {torch.cuda.device_count()} are "
            "visible; start fewer ranks a host"
        )
    return torch.device("cuda", local)


@contextlib.contextmanager
def joined(device: torch.device) -> Generator[None]:
    """The process group of the launcher's ranks; none where there is one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def limit_memory(device: torch.device, fractions: Sequence[float]) -> None:
    """Lets this process use a part of its GPU's memory only: one for all ranks, or one a rank.

    Raises:
        ConfigError: a fraction is out of range, there are not as many as ranks, or no GPU.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if any(not 0.0 < fraction <= 1.0 for fraction in fractions):
        raise ConfigError(f"--device-memory-fraction {fractions}: must be in (0, 1]")
    if len(fractions) not in (1, world_size):
        raise ConfigError(
            f"--device-memory-fraction has {len(fractions)} values for {world_size} ranks: give "
            "one, or one a rank"
        )
    if device.type != "cuda":
        raise ConfigError("--device-memory-fraction is of a GPU, and there is none: leave it out")
    torch.cuda.set_per_process_memory_fraction(fractions[rank % len(fractions)], device)
