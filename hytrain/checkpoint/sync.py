"""What was written is on the disk before anything relies on it: a loss of power takes none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 8
"""Waits for a disk, which writes many files' ends as fast as one's."""
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)
"""What file systems say that keep folders otherwise."""


def sync_files(root: Path, files: Sequence[Path]) -> None:
    """Waits until files and the folders that they are in, up to ``root``, are on the disk.

    Raises:
        OSError: one is not; what was written to it may be lost.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(_sync, files))
    sync_names(root, files)


def sync_names(root: Path, files: Iterable[Path]) -> None:
    """Waits until files' names are on the disk, in the folders that they are in up to ``root``.

    Raises:
        OSError: one is not; what was written to it may be lost.
    """
    folders = {folder for file in files for folder in file.parents if folder.is_relative_to(root)}
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(sync_folder, folders))


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk.

    Raises:
        OSError: they are not.
    """
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
