"""Ends a process that cannot go on: with an exception if that is possible, else at once.

A rank whose job is lost may stand where no exception reaches it: in a collective of gloo's that
waits for another survivor, in a call of the user's own, or in code that has no collective for an
hour. On its way out it may be held up by what it leaves behind: destructors wait for threads that
wait for a collective, and a thread that comes back from one while the interpreter ends aborts it.

Also publishes a fatal exception to the other ranks before the default excepthook runs.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from hytrain.comm.call_sites import Call, is_in_torch_distributed, stack_of
from hytrain.comm.failure_messages import is_connection_error
from hytrain.errors import HyTrainError, OutOfStepError, RankFailedError

RAISE_SECONDS = 1.5
"""After this time the exception is raised in a thread that has come to no collective by itself."""
STUCK_SECONDS = 4.5
"""After this time a process is ended whose thread has not come out of where it stands."""
EXIT_SECONDS = 5.0
"""How long a lost process may take for its atexit handlers."""
CAUGHT_SECONDS = 30.0
"""The same if the failure was caught, and the interpreter shuts down by itself."""


class Ending:
    """The end of this process, once that is certain."""

    def __init__(self) -> None:
        """The thread to end is the calling one."""
        self._thread = threading.get_ident()
        self._failure: HyTrainError | None = None
        self._since: float | None = None
        self._was_raised = False
        self._was_told = False
        self._told = threading.Event()
        # Held from the look at _told to the raise: without it told() could clear the exception in
        # between, and the thread would get it once more while the first one unwinds it. Not a Lock:
        # a signal's handler may call told() within told(), and would wait for a Lock forever.
        self._raising = threading.RLock()

    def told(self) -> None:
        """Notes that the thread is about to raise the failure, or one of its own, by itself."""
        with self._raising:
            self._told.set()
            if self._failure is not None and threading.get_ident() == self._thread:
                _raise_in(self._thread, None)  # not once more

    def require(self, failure: HyTrainError) -> None:
        """Requires the process to end; from now on :meth:`turn` must be called again and again.

        ``failure``: what the thread is to raise.
        """
        self._failure = failure
        _failures.append(failure)
        process = os.getpid()
        with suppress(Exception):  # the interpreter may be ending already
            # Even if the failure is caught, the process must end.
            atexit.register(lambda: os.getpid() == process and limit_exit(CAUGHT_SECONDS))

    def turn(self) -> None:
        """Raises the failure in the thread, or ends the process, if it is time."""
        is_running = any(each.ident == self._thread for each in threading.enumerate())
        if self._failure is None or not is_running:
            return
        stack = stack_of(self._thread)
        is_told, now = self._told.is_set(), time.monotonic()
        # Clean-up after the failure must not wait for the others again.
        is_out = is_told and not _is_held(stack)
        if is_out or self._since is None or is_told != self._was_told:
            self._was_told, self._since = is_told, None if is_out else now
        elif now - self._since > STUCK_SECONDS:
            stood = "it did not come out of where it stood"
            self._end_here(stack, "it waits for other ranks on its way out" if is_told else stood)
        elif is_told or is_in_torch_distributed(stack):
            return
        elif now - self._since > RAISE_SECONDS:
            self._raise()

    def _raise(self) -> None:
        """Raises the failure in the thread, as a class: only that can be raised in another one."""
        failure, told = self._failure, self._told
        kind = type(failure)

        def begin(error: BaseException, *_arguments: object) -> None:
            told.set()
            BaseException.__init__(error, str(failure))

        same = {"__init__": begin, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        with self._raising:
            if not self._told.is_set() and not self._was_raised:
                self._was_raised = True
                _raise_in(self._thread, type(kind.__name__, (kind,), same))  # pyright: ignore[reportArgumentType]

    def _end_here(self, stack: list[Call], why: str) -> None:
        kind = type(self._failure)
        with suppress(Exception):
            _flush()
            calls = [f'  File "{c.file}", line {c.line}, in {c.function}\n' for c in stack[::-1]]
            # Clean-up code may have redirected Python's own stream (seen in destroy()).
            text = (
                f"Traceback (most recent call last):\n{''.join(calls)}"
                f"{kind.__module__}.{kind.__qualname__}: {self._failure}\n"
                f"(This process is ended: {why}.)\n"
            )
            os.write(2, text.encode(errors="replace"))
        os._exit(1)


def _is_held(stack: list[Call]) -> bool:
    ends = ("destroy", "destroy_process_group")
    return is_in_torch_distributed(stack) or any(call.function in ends for call in stack)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Has a thread raise ``kind`` at its next line; None: cancels that."""
    exception = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


_is_limited = False


def limit_exit(seconds: float) -> None:
    """Ends the process within ``seconds``, whatever holds it. Only the first limit counts."""
    global _is_limited
    if _is_limited:
        return
    _is_limited = True
    with suppress(Exception):
        # By a thread of C, which needs no interpreter: that may be gone by then.
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def exit_with(code: int) -> None:
    """Has the process end after its atexit handlers, without the interpreter's own shutdown.

    Threads that wait in collectives of gloo cannot be ended. One that comes back while the
    interpreter is being taken down is unwound through C++ that does not allow it: SIGABRT.
    """
    limit_exit(EXIT_SECONDS)
    process = os.getpid()

    def leave() -> None:
        if os.getpid() != process:
            return
        atexit.unregister(leave)
        with suppress(Exception):
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        _flush()
        os._exit(code)

    atexit.register(leave)  # the last one is called first


class Watch(Protocol):
    """Publishes the end of this process to the other ranks."""

    def tell(self, error: BaseException, *, final: bool) -> None:
        """Publishes an error to the other ranks."""
        ...

    def explain(self, error: Exception) -> object:
        """Looks for another rank's failure behind a connection that was lost."""
        ...

    def flush(self) -> None:
        """Waits until what was told is there."""
        ...


_open_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_failures: list[HyTrainError] = []
"""The failures that this process has found; the first is the reason for its end."""
_hooked = False


def follow(watch: Watch) -> None:
    """Publishes a fatal exception to a watch's ranks, until :func:`forget`."""
    global _hooked
    _open_watches.add(watch)
    if not _hooked:
        _hooked = True
        _hook_exceptions()


def forget(watch: Watch) -> None:
    """Ends :func:`follow`."""
    _open_watches.discard(watch)


def _hook_exceptions() -> None:
    show, process = sys.excepthook, os.getpid()

    def tell_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != process:
            show(kind, error, trace)
            return
        watches = list(_open_watches)
        is_others = isinstance(error, (RankFailedError, OutOfStepError))
        is_lost = isinstance(error, Exception) and is_connection_error(error)
        if isinstance(error, Exception) and is_lost and not is_others:
            # Another rank's failure may be behind a collective of the script's own.
            for watch in watches:
                watch.explain(error)
            if _failures:
                _failures[0].__cause__ = error
                kind, error, trace = type(_failures[0]), _failures[0], _failures[0].__traceback__
        for watch in watches:
            watch.tell(error, final=True)
        show(kind, error, trace)
        for watch in watches:
            watch.flush()
        if isinstance(error, Exception) and (_failures or is_lost):
            exit_with(1)

    sys.excepthook = tell_and_show
