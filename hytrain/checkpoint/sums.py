"""Sums of a file's bytes, one for each block: made while it is written, asked for when it is read.

CRC-32 finds every damage within 32 bits and any other but one in four billion, many times as fast
as any digest; the sum is the same whichever way the bytes came. Blocks, so that a rank which needs
a piece of a file reads and checks that piece alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

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

    What is written is handed to the system in pieces, and the last of it by :meth:`sync` or
    :meth:`close`.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: it cannot be opened.
        """
        self.name = path.name
        self._descriptor = -1
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
        )
        self._native: _C.SummedFile | None = _C.SummedFile(self._descriptor)
        self._sums = FileSums(0, ())

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> int:
        """Appends all of ``data``.

        Raises:
            OSError: it, or what came before it, could not be written.
        """
        self.append(memoryview(data))
        return memoryview(data).nbytes

    def append(self, data: memoryview) -> int:
        """As :meth:`write`; returns the CRC-32 of ``data``."""
        if data.nbytes == 0:
            return 0
        return self._file.write(_address(data), data.nbytes)

    @property
    def _file(self) -> _C.SummedFile:
        if self._native is None:
            raise ValueError(f"{self.name} is closed")
        return self._native

    def end(self) -> None:
        """Hands the last of it to the system, and its buffer to another file; may be synced still.

        May be called twice.

        Raises:
            OSError: it could not be written.
        """
        if self._native is not None:
            self._native.flush()
            self._sums, self._native = _sums_of(self._native), None

    def sync(self) -> None:
        """Waits until what has been written is on the disk.

        Raises:
            OSError: it is not.
        """
        if self._native is not None:
            self._native.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """May be called twice.

        Raises:
            OSError: the last of it could not be written.
        """
        try:
            self.end()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Closes it as it is, where it is of no use any more; never raises."""
        if self._native is not None:
            self._sums, self._native = _sums_of(self._native), None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def flush(self) -> None:
        """Nobody waits for bytes of an unfinished file; torch asks for it."""

    def tell(self) -> int:
        """Bytes so far."""
        return self._file.num_bytes

    @property
    def sums(self) -> FileSums:
        """Of what has been written so far."""
        return self._sums if self._native is None else _sums_of(self._native)

    def __enter__(self) -> SummingFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()


def _sums_of(file: _C.SummedFile) -> FileSums:
    return FileSums(file.num_bytes, tuple(file.sums()))


def crc32(data: memoryview) -> int:
    """The CRC-32 of bytes: zlib's, at the rate at which memory is read."""
    return _C.crc32(0, _address(data), data.nbytes) if data.nbytes else 0


def _address(data: memoryview) -> int:
    # It lives as long as the caller's view does.
    return np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]


def sum_file(path: Path) -> FileSums:
    """The sums of a file as it is.

    Raises:
        OSError: it cannot be read.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    blocks: list[int] = []
    num_bytes = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while count := read_at(descriptor, num_bytes, buffer):
            blocks.append(crc32(buffer[:count]))
            num_bytes += count
    finally:
        os.close(descriptor)
    return FileSums(num_bytes, tuple(blocks))


def damaged_blocks(path: Path, sums: FileSums, begin: int, end: int) -> list[int]:
    """Those of the blocks ``[begin, end)`` of a file that are not what was written.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        low, high = sums.bounds(begin)[0], sums.bounds(end - 1)[1]
        return _read(descriptor, sums, low, high, 0, threads=1)
    finally:
        os.close(descriptor)


def read_checked(
    descriptor: int, sums: FileSums, offset: int, target: memoryview, *, threads: int
) -> list[int]:
    """Fills ``target`` with a file's bytes from ``offset`` on.

    Args:
        descriptor: of the file.
        sums: the file's, when it was written; it had all of these bytes.
        offset: in the file.
        target: one byte at least.
        threads: that read; none of them needs Python's lock.

    Returns:
        Blocks that are not what was written; ``target`` has some of their bytes.

    Raises:
        OSError: it cannot be read.
    """
    end = offset + target.nbytes
    return _read(descriptor, sums, offset, end, _address(target), threads=threads)


def _read(
    descriptor: int, sums: FileSums, begin: int, end: int, address: int, *, threads: int
) -> list[int]:
    blocks = sums.blocks[begin // BLOCK_BYTES : -(-end // BLOCK_BYTES)]
    return _C.read_checked(descriptor, sums.num_bytes, begin, end, blocks, address, threads)


def read_at(descriptor: int, offset: int, target: memoryview) -> int:
    """Fills ``target`` with a file's bytes from ``offset`` on; fewer only at its end.

    Returns:
        How many bytes were read.

    Raises:
        OSError: it cannot be read.
    """
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
