"""A separate thread for calls that may never return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Ended(threading.Event):
    """Set when a submitted task has ended."""

    value: Any = None
    error: BaseException | None = None

    def result(self) -> Any:
        """Returns what the task has returned, or raises what it has raised."""
        if self.error is None:
            return self.value
        try:
            raise self.error
        finally:
            self.error = None  # its traceback leads here: a cycle would keep all frames' tensors


class DaemonExecutor:
    """A thread that runs one task after another.

    Not one of concurrent.futures: the interpreter would wait for it at its end.
    """

    def __init__(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        """``name``: name of the thread, which starts with the first task; ``then``: called after
        every task, in that thread.
        """
        self._name = name
        self._then = then
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Ended] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], object]) -> Ended:
        """Queues a task."""
        if self._thread is None:
            # A daemon: the interpreter's end would join any other thread, which may stand in a
            # collective whose other ranks are gone.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        ended = Ended()
        self._tasks.put((task, ended))
        return ended

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, ended = item
            try:
                ended.value = task()
            except BaseException as error:
                ended.error = error
            # The thread blocks in get() next: what its frame refers to would live until that
            # returns. Before set(), or the caller could go on with the tensors' memory still taken.
            del task, item
            ended.set()  # after `error`, which the caller reads without a lock
            del ended
            self._then()

    def close(self, seconds: float = 0.0) -> None:
        """Ends the thread after its tasks; leaves it alone if that takes more than ``seconds``."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(seconds)
