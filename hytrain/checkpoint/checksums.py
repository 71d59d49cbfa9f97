"""Sums of a file's bytes, one for each block: made while it is written, asked for when it is read.

CRC-32 finds every damage within 32 bits and any other but one in four billion, many times as fast
as any digest; the sum is the same whichever way the bytes came. Blocks, so that a rank which needs
a piece of a file reads and checks that piece alone.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hytrain import _C

BLOCK_BYTES = 1 << 20
"""Small enough for a core's cache, which then has the bytes still when they are copied."""


@dataclass(frozen=True, slots=True)
class FileSums:
    """What a file was when it was written.

    Attributes:
        num_bytes: its length.
        blocks: CRC-32 of each :data:`BLOCK_BYTES`; the last block may be shorter.
    """

    num_bytes: int
    blocks: tuple[int, ...]

    def bounds(self, block: int) -> tuple[int, int]:
        """``[begin, end)`` of a block in the file."""
        begin = block * BLOCK_BYTES
        return begin, min(begin + BLOCK_BYTES, self.num_bytes)


class SummingFile:
    """A file that is written from its beginning to its end, and summed as it is.

    What is written is handed to the system in pieces, and the last of it by :meth:`end`.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be opened.
        """
        self.name = path.name
        self._native: _C.SummedFile | None = None
        self._descriptor = -1
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
        )
        self._native = _C.SummedFile(self._descriptor)
        self.sums = FileSums(0, ())
        """Of all of it, when it has ended."""

    def __del__(self) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> None:
        """Appends all of ``data``.

        Raises:
            OSError: it, or what came before it, could not be written.
        """
        if self._native is None:
            raise ValueError(f"{self.name} is closed")
        if memoryview(data).nbytes:
            view = np.frombuffer(data, dtype=np.uint8)
            self._native.write(view.__array_interface__["data"][0], view.nbytes)

    def end(self) -> None:
        """Hands the last of it to the system, and its buffer to another file; may be synced still.

        May be called twice.

        Raises:
            OSError: it could not be written.
        """
        if self._native is not None:
            self._native.flush()
            self.sums = FileSums(self._native.num_bytes, tuple(self._native.sums()))
            self._native = None

    def sync(self) -> None:
        """Ends it, and waits until all of it is on the disk.

        Raises:
            OSError: it is not.
        """
        self.end()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """As it is, if it has not ended: nobody will read it then. Never raises."""
        self._native = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def damaged_blocks(path: Path, sums: FileSums, begin: int, end: int) -> list[int]:
    """Those of the blocks ``[begin, end)`` of a file that are not what was written.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        low, high = sums.bounds(begin)[0], sums.bounds(end - 1)[1]
        expected = sums.blocks[begin:end]
        return _C.read_checked(descriptor, sums.num_bytes, low, high, expected, 0, 1)
    finally:
        os.close(descriptor)


def sum_file(path: Path) -> FileSums:
    """The sums of a file as it is.

    Raises:
        OSError: it cannot be read.
    """
    blocks: list[int] = []
    num_bytes = 0
    with path.open("rb") as file:
        while content := file.read(BLOCK_BYTES):
            blocks.append(zlib.crc32(content))
            num_bytes += len(content)
    return FileSums(num_bytes, tuple(blocks))
