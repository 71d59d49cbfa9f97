"""A thread of one's own for what may never end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Ended(threading.Event):
    """Set when something that was handed over has ended."""

    error: BaseException | None = None

    def result(self) -> None:
        """Raises what it has raised."""
        if self.error is None:
            return
        try:
            raise self.error
        finally:
            self.error = None  # its traceback leads here: a cycle would keep all frames' tensors


class DaemonExecutor:
    """A thread that does one thing after another.

    Not of concurrent.futures: the interpreter would wait for its threads at the end.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], object], Ended] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], object]) -> Ended:
        """Hands a task over."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hytrain-lane", daemon=True)
            self._thread.start()
        ended = Ended()
        self._tasks.put((task, ended))
        return ended

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, ended = item
            try:
                task()
            except BaseException as error:
                ended.error = error
            del task, item  # tensors must not live on here
            ended.set()
            del ended

    def close(self) -> None:
        """No task follows; one that does not end is left alone."""
        if self._thread is not None:
            self._tasks.put(None)
