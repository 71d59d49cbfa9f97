"""Threads that write a checkpoint's files side by side: a disk takes many as fast as it can."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from hytrain import _C

WRITERS = 8


class FileWriters:
    """Files in any order, and one archive's parts in theirs, with a limit to what is in memory."""

    def __init__(self, threads: int, most_bytes: int) -> None:
        """
        Args:
            threads: that write files; the archive has one more.
            most_bytes: of copies that are there to be written; more where one alone is larger.
        """
        self._files = ThreadPoolExecutor(threads, "hytrain-write")
        self._archive = ThreadPoolExecutor(1, "hytrain-archive")
        self._most = most_bytes
        self._held = 0
        self._changed = threading.Condition()
        self._batch: list[Future[None]] = []
        self._batches: deque[tuple[list[Future[None]], Callable[[], None]]] = deque()

    @property
    def held(self) -> int:
        """Bytes of copies that are there."""
        return self._held

    def hold(self, num_bytes: int) -> None:
        """Waits until there may be a copy of so many bytes more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + num_bytes <= self._most)
            self._held += num_bytes

    def write(
        self, files: Sequence[Callable[[], None]], archive: Callable[[], None] | None, held: int
    ) -> None:
        """Calls functions, none of which may raise, in the threads.

        Args:
            files: each writes a file.
            archive: writes a part of the archive, behind those before it.
            held: bytes, of :meth:`hold`, that are free when all of them have returned.
        """
        futures = [self._files.submit(act) for act in files]
        if archive is not None:
            futures.append(self._archive.submit(archive))
        left = len(futures)

        def done(_: Future[None]) -> None:
            nonlocal left
            with self._changed:
                left -= 1
                if left == 0:
                    self._held -= held
                    self._changed.notify_all()

        for future in futures:
            future.add_done_callback(done)
        self._batch += futures

    def end_batch(self, then: Callable[[], None]) -> None:
        """Calls ``then``, in this or a later call of this thread, when all so far is written."""
        self._batches.append((self._batch, then))
        self._batch = []
        while self._batches and all(future.done() for future in self._batches[0][0]):
            self._end_first()

    def _end_first(self) -> None:
        futures, then = self._batches.popleft()
        for future in futures:
            future.result()
        then()

    def finish(self) -> None:
        """Waits for all of it."""
        while self._batches:
            self._end_first()

    def __enter__(self) -> FileWriters:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pool in (self._files, self._archive):
            pool.shutdown(wait=True, cancel_futures=kind is not None)
        _C.trim_write_buffers()
