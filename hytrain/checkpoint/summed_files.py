"""Files of checkpoints: checksummed while they are written, and on the disk when done.

A sum is a CRC-32 of a block: it finds every damage within 32 bits and any other but one in four
billion, many times as fast as any digest. It is of a block so that a rank which needs a piece of a
file checks that piece alone.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from hytrain import _C

BLOCK_BYTES = 1 << 20
"""Small enough for a core's cache, which still has the bytes when they are copied."""

_THREADS = 8
"""Threads that wait for a disk, which writes many files' ends as fast as one's."""
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)
"""Errors of file systems that cannot sync folders."""


@dataclass(frozen=True, slots=True)
class FileSums:
    """A file's length and sums when it was written.

    Attributes:
        blocks: CRC-32 of each :data:`BLOCK_BYTES`; the last block may be shorter.
        host: the name of the only host that has saved it (see host_parts.py); None: all have.
    """

    num_bytes: int
    blocks: tuple[int, ...]
    host: str | None = None

    def bounds(self, block: int) -> tuple[int, int]:
        """``[begin, end)`` of a block in the file."""
        begin = block * BLOCK_BYTES
        return begin, min(begin + BLOCK_BYTES, self.num_bytes)


class SummingFile:
    """A file that is written from its beginning to its end, and checksummed as it is written.

    torch's writer takes it. Errors are kept for :meth:`check`: the destructor of an abandoned
    writer writes what was left, when this is closed, and an error there would end the process.

    Attributes:
        sums: of the whole file, once it has ended.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.sums = FileSums(0, ())
        self._error: Exception | None = None
        self._native: _C.SummedFile | None = None
        self._descriptor = -1
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666
        )
        self._native = _C.SummedFile(self._descriptor)

    def __del__(self) -> None:
        self.close()

    def write(self, data: bytes | memoryview) -> int:
        """Appends all of ``data``; does not raise."""
        num_bytes = memoryview(data).nbytes
        if self._error is None and num_bytes:
            try:
                if self._native is None:
                    raise ValueError(f"{self.name} is closed")
                view = np.frombuffer(data, dtype=np.uint8)
                self._native.write(view.__array_interface__["data"][0], num_bytes)
            except Exception as error:
                self._error = error
        return num_bytes

    def flush(self) -> None:
        """Does nothing, for torch: nobody waits for bytes of an unfinished file."""

    def check(self) -> None:
        """Raises what :meth:`write` has failed with."""
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Hands the rest to the system, and its buffer to another file; may be called twice."""
        self.check()
        if self._native is not None:
            self._native.flush()
            self.sums = FileSums(self._native.num_bytes, tuple(self._native.sums()))
            self._native = None

    def sync(self) -> None:
        """Ends it, and waits until all of it is on the disk."""
        self.end()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes it, as it is if it has not ended: nobody will read it then. Never raises."""
        self._native = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def begin_file(path: Path, stored: object) -> SummingFile:
    """Writes what ``torch.save`` would, or bytes as they are; :func:`finish_file` is to follow."""
    file = SummingFile(path)
    try:
        if isinstance(stored, bytes):
            file.write(stored)
        else:
            torch.save(stored, cast(Any, file))
        file.end()
    except BaseException:
        file.close()
        raise
    return file


def finish_file(file: SummingFile) -> FileSums:
    """Waits until it is on the disk, and closes it."""
    with closing(file):
        file.sync()
    return file.sums


def write_file(path: Path, stored: object) -> None:
    """Replaces a file by what :func:`begin_file` writes: as a whole, or not at all.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f"{path.stem}.tmp{os.getpid()}")
    try:
        finish_file(begin_file(temporary, stored))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def damaged_blocks(path: Path, sums: FileSums, begin: int, end: int) -> list[int]:
    """Those of the blocks ``[begin, end)`` of a file that are not what was written."""
    damaged: list[int] = []
    buffer = np.empty(BLOCK_BYTES, dtype=np.uint8)
    address, view = buffer.__array_interface__["data"][0], memoryview(cast(Any, buffer))
    with path.open("rb") as file:
        file.seek(sums.bounds(begin)[0])
        for block in range(begin, end):
            low, high = sums.bounds(block)
            # Neither of the two holds Python's lock.
            count = file.readinto(view[: high - low])
            if count != high - low or _C.crc32(0, address, count) != sums.blocks[block]:
                damaged.append(block)
    return damaged


def sync_names(root: Path, files: Iterable[Path]) -> None:
    """Waits until files' names are on the disk, in the folders that they are in up to ``root``."""
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(root)}
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(sync_folder, folders))


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
