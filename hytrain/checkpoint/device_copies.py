"""Copies of state on its own device: made in milliseconds, and given back when they are written."""

from __future__ import annotations

import logging

import torch

from hytrain.hardware.gpu_memory import spare_gpu_bytes

logger = logging.getLogger(__name__)


class DeviceCopies:
    """Memory of the device beside that of training, for one save.

    It is a pool of its own: what a stream has freed stays that stream's otherwise, and training
    would find the device full of what nobody uses.
    """

    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: the layers'; on a CPU there is no room.
        """
        self._device = device
        # Asked for by the first copy: the driver may take milliseconds of a save's call.
        self._room: int | None = None
        self._pool: torch.cuda.MemPool | None = None

    def copy(self, source: torch.Tensor) -> torch.Tensor | None:
        """A copy, issued on the current stream; None where there is no room for it."""
        if self._room is None:
            self._room = spare_gpu_bytes(self._device)
        if source.nbytes > self._room:
            return None
        try:
            copied = self._clone(source)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            # Training may have taken the memory meanwhile: the copy goes to the host.
            logger.info("no copy of the state on the device: %s", error)
            self._room = 0
            return None
        self._room -= source.nbytes
        return copied

    def _clone(self, source: torch.Tensor) -> torch.Tensor:
        if self._device.type != "cuda":
            return source.clone()
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return source.clone()

    def close(self) -> None:
        """Gives the memory back; no copy is referred to any more."""
        self._pool = None
