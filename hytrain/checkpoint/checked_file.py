"""A file of a checkpoint that returns only what was written: every byte read is checked."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any, cast

import torch

from hytrain.checkpoint.parallel import reading_threads
from hytrain.checkpoint.sums import BLOCK_BYTES, FileSums, read_checked
from hytrain.errors import CheckpointError


class CheckedFile:
    """Reads a file; what is checked is the caller's own copy, so no later damage can reach it."""

    def __init__(self, path: Path, sums: FileSums) -> None:
        """
        Raises:
            OSError: it cannot be opened.
        """
        self._descriptor = -1
        self.path = path
        self.num_bytes = sums.num_bytes
        self._sums = sums
        self._open()
        # The block that was read in part last: what is read next often begins in it.
        self._block = -1
        self._kept = memoryview(b"")

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _open(self) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDONLY)

    def set_aside(self) -> None:
        """Until it is read again it takes no descriptor, of which a process has few, or memory."""
        descriptor, self._descriptor = self._descriptor, -1
        self._block, self._kept = -1, memoryview(b"")
        if descriptor >= 0:
            os.close(descriptor)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fills ``target`` with the file's bytes from ``offset`` on.

        Raises:
            CheckpointError: they are not those that were written.
            OSError: they cannot be read.
        """
        end = offset + len(target)
        if end > self.num_bytes:
            raise CheckpointError(f"{self.path} ends before byte {end}: load another tag")
        if offset == end:
            return
        block = offset // BLOCK_BYTES
        low, high = self._sums.bounds(block)
        if end <= high and len(target) < high - low:
            target[:] = self._keep(block)[offset - low : end - low]
        else:
            self._fill(offset, target)

    def read(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The file's bytes from ``offset`` on, as uint8; otherwise as :meth:`read_into`."""
        content = torch.empty(num_bytes, dtype=torch.uint8)
        self.read_into(offset, memoryview(cast(Any, content.numpy())))
        return content

    def _keep(self, block: int) -> memoryview:
        if block != self._block:
            low, high = self._sums.bounds(block)
            kept = memoryview(bytearray(high - low))
            self._fill(low, kept)
            self._block, self._kept = block, kept
        return self._kept

    def _fill(self, offset: int, target: memoryview) -> None:
        self._open()
        threads = reading_threads()
        damaged = read_checked(self._descriptor, self._sums, offset, target, threads=threads)
        if damaged:
            low, high = self._sums.bounds(damaged[0])
            raise CheckpointError(
                f"{self.path} has changed while it was loaded: bytes {low} to {high} are not those "
                "that were saved; load again, or another tag"
            )


class CheckedStream(io.RawIOBase):
    """A :class:`CheckedFile` for code that reads from a stream."""

    def __init__(self, file: CheckedFile) -> None:
        super().__init__()
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.num_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"there is no byte {origin + offset}")
        self._at = origin + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Fills ``buffer``, or what the file has of it."""
        count = max(0, min(len(buffer), self._file.num_bytes - self._at))
        self._file.read_into(self._at, memoryview(buffer)[:count])
        self._at += count
        return count
