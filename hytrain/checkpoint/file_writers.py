"""Writes a rank's files of one save in threads; the first failure is kept.

Many files are written side by side, as fast as the disk takes them. Other threads wait until they
are on the disk, half of the time that a file takes: those that write go on with the next.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hytrain import _C
from hytrain.checkpoint.summed_files import FileSums, SummingFile, begin_file, finish_file

WRITERS = 8
_SYNCS = 8
"""Threads that wait for the disk."""
_UNSYNCED = 64
"""Files that may be open to be synced; small ones are written faster than synced."""

UNCHANGED = '"latest" is unchanged, and so is what was saved under the tag before'
"""What a message about a failed save ends with."""


class FileWriters:
    """Writer of files in any order and of one archive's parts in theirs, with limited memory.

    Attributes:
        failure: why something was not written; nothing is written after it.
        sums: path -> sums, of the files that are on the disk.
    """

    def __init__(
        self,
        threads: int,
        most_bytes: int,
        failure: str | None = None,
        room: Callable[[], str] = str,
    ) -> None:
        """
        Args:
            threads: number that write files; the archive has one more.
            most_bytes: of copies that wait to be written; more if one alone is larger.
            failure: why nothing is to be written, if there is a reason.
            room: gives what to say of the disk if it is full.
        """
        self.failure = failure
        self.sums: dict[Path, FileSums] = {}
        self._room = room
        self._files = ThreadPoolExecutor(threads, "hytrain-write")
        self._archive = ThreadPoolExecutor(1, "hytrain-archive")
        self._syncs = ThreadPoolExecutor(_SYNCS, "hytrain-sync")
        self._may_sync = threading.Semaphore(_UNSYNCED)
        self._most, self.held = most_bytes, 0
        self._changed = threading.Condition()
        self._written: list[Future[None]] = []

    def hold(self, num_bytes: int) -> None:
        """Waits until copies may take ``num_bytes`` more, and counts these as held."""
        with self._changed:
            self._changed.wait_for(lambda: not self.held or self.held + num_bytes <= self._most)
            self.held += num_bytes

    def write(
        self,
        files: Sequence[tuple[Path, object]],
        archive: Callable[[], None] | None = None,
        held: int = 0,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes files in the threads.

        Args:
            files: paths and what goes there, see :func:`begin_file`.
            archive: writes a part of the archive, behind those before it; must not raise.
            held: bytes of :meth:`hold` that become free when all of it is written.
            then: called at that time, in any thread.
        """
        part = None if archive is None else self._archive.submit(archive)

        def write() -> None:
            try:
                for path, stored in files:
                    self.put(path, stored)
                if part is not None:
                    part.result()
            finally:
                with self._changed:
                    self.held -= held
                    self._changed.notify_all()
                then()

        self._written.append(self._files.submit(write))

    def wait(self) -> None:
        """Waits until all so far is written; raises what no rank can answer for (a test's kill)."""
        for future in self._written:
            future.result()
        self._written.clear()

    def put(self, path: Path, stored: object) -> None:
        """Writes a file, now; it is on the disk when :meth:`close` has returned."""
        self.try_to(partial(self._put, path, stored), f"{path} could not be written")

    def _put(self, path: Path, stored: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = begin_file(path, stored)
        self._may_sync.acquire()
        self._syncs.submit(self._finish, file, path)

    def _finish(self, file: SummingFile, path: Path) -> None:
        try:
            # After a failure, too: a useless file is not left open.
            self.sums[path] = finish_file(file)
        except Exception as error:
            self._note(f"{path} could not be written", UNCHANGED, error)
        finally:
            self._may_sync.release()

    def close(self) -> None:
        """Waits until all files are on the disk, or have failed to get there.

        To be called before the folder is renamed or removed.
        """
        for pool in (self._files, self._archive, self._syncs):
            pool.shutdown(wait=True, cancel_futures=pool is not self._syncs)
        _C.trim_write_buffers()

    def try_to(self, act: Callable[[], object], problem: str, outcome: str = UNCHANGED) -> None:
        """Calls ``act`` if nothing has failed before.

        If it fails, the message begins with ``problem``, and ends with ``outcome``: what is left.
        """
        if self.failure is not None:
            return
        try:
            act()
        except Exception as error:
            # A rank that raised here would leave the others waiting; it raises with them later.
            self._note(problem, outcome, error)

    def _note(self, problem: str, outcome: str, error: Exception) -> None:
        if self.failure is None:
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            room = f"{self._room()}; " if is_full else ""
            remedy = f"{room}free space or mend the folder and save again"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "close files, or allow more (ulimit -n), and save again"
            self.failure = f"{problem} ({type(error).__name__}: {error}): {remedy}; {outcome}"
