"""One job saves under a tag at a time.

<save_dir>/hytrain-lock-<tag>    locked (flock) while a save runs; says by whom

The lock ends with the process, however that ends. Where a file system has no such locks (some of
those between hosts) a second job is not noticed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from hytrain.errors import CheckpointError

PREFIX = "hytrain-lock-"


class TagLock:
    """Held until :meth:`release`."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: the tag's; its parent exists.

        Raises:
            CheckpointError: another save under this tag runs, in this process or another.
            OSError: there can be no file.
        """
        self._path = folder.with_name(PREFIX + folder.name)
        self._descriptor = -1
        while self._descriptor < 0:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(descriptor, folder)
                # Whoever had it may have removed it meanwhile: then another file has the name.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                        self._descriptor = descriptor
            finally:
                if self._descriptor < 0:
                    os.close(descriptor)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        with suppress(OSError):  # where the disk is full, the lock holds all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, who.encode(), 0)

    def _lock(self, descriptor: int, folder: Path) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return  # there are no locks here
            who = os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
            raise CheckpointError(
                f"another job is saving under the tag '{folder.name}' in {folder.parent} ({who}): "
                "give each job a folder or tags of its own, or save again when that one has "
                "ended; nothing was changed"
            ) from None

    def release(self) -> None:
        """Never raises."""
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            # Forked processes have the descriptor, too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(self._descriptor)
