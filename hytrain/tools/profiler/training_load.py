"""What goes on beside the CPU's update in training: copies both ways, and the launching thread."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

import torch

_BUFFER_BYTES = 32 * 2**20
_HASHED = bytes(1 << 16)


class TrainingLoad:
    """A thread that keeps a core busy, and copies on request.

    A gradient arrives and new weights leave for every parameter of an update: as many bytes each
    way as the training copy has. The thread stands for the one that launches the GPU's kernels; it
    computes, without the interpreter's lock, and touches no memory to speak of.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """
        Args:
            device: a GPU; of a CPU its own memory is copied, by one more thread.
            num_bytes: that :meth:`copy` moves each way.
        """
        is_cuda = device.type == "cuda"
        size = min(num_bytes, _BUFFER_BYTES)
        self._times = -(-num_bytes // size)
        host = [torch.zeros(size, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        there = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        self._ways = [(host[0], there[0]), (there[1], host[1])]  # (to, from)
        self._streams = [torch.cuda.Stream(device) for _ in self._ways] if is_cuda else []
        self._copies: threading.Thread | None = None
        self._over = threading.Event()
        self._launcher: threading.Thread | None = None

    def __enter__(self) -> TrainingLoad:
        self._over.clear()
        self._launcher = threading.Thread(target=self._compute, daemon=True)
        self._launcher.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        if self._launcher is not None:
            self._launcher.join()
        self.wait()

    def _compute(self) -> None:
        while not self._over.is_set():
            hashlib.sha256(_HASHED).digest()

    def beside(self, run: Callable[[], float]) -> float:
        """What ``run`` returns, with the copies of one update beside it."""
        self._start_copies()
        result = run()
        self.wait()
        return result

    def _start_copies(self) -> None:
        if not self._streams:
            self._copies = threading.Thread(target=self._copy_all, daemon=True)
            self._copies.start()
            return
        for _ in range(self._times):
            for stream, (target, source) in zip(self._streams, self._ways, strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)

    def _copy_all(self) -> None:
        for _ in range(self._times):
            for target, source in self._ways:
                target.copy_(source)

    def wait(self) -> None:
        """Until all copies are done."""
        if self._copies is not None:
            self._copies.join()
            self._copies = None
        for stream in self._streams:
            stream.synchronize()
