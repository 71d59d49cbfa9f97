"""Ends a process that cannot go on: with an exception where that is possible, else at once.

A rank whose job is lost may stand where no exception reaches it: in a collective of gloo's that
waits for another survivor, in a call of the user's own, or in code that has no collective for an
hour. And on its way out, what was left behind may hold it: destructors wait for threads that wait
for a collective, and a thread that comes back from one while the interpreter ends aborts it.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from hytrain.comm.call_sites import is_in_torch_distributed
from hytrain.errors import HyTrainError

logger = logging.getLogger(__name__)

RAISE_SECONDS = 1.5
"""After that a thread that has met no collective by itself gets the exception where it is."""
STUCK_SECONDS = 4.5
"""After that a process whose thread has not come out of where it stands is ended."""
EXIT_SECONDS = 5.0
"""What a lost process may take for handlers of atexit."""
CAUGHT_SECONDS = 30.0
"""The same where the failure was caught, and the interpreter takes itself down."""


class Ending:
    """The end of this process, once that is certain."""

    def __init__(self, end: Callable[[int], None] = os._exit) -> None:
        """For the calling thread.

        Args:
            end: ends the process at once.
        """
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._end = end
        self._failure: HyTrainError | None = None
        self._told = threading.Event()
        # Held from the look at _told to the raise: without it told() could clear the exception in
        # between, and the thread would get it once more while the first one unwinds it. A signal's
        # handler may come to told() within told(): not a Lock, which it would wait for forever.
        self._raising = threading.RLock()

    def told(self) -> None:
        """The thread is about to raise the failure, or one of its own, by itself."""
        with self._raising:
            self._told.set()
            if self._failure is not None and threading.get_ident() == self._thread:
                _raise_in(self._thread, None)  # not once more

    def require(self, failure: HyTrainError) -> None:
        """From now on the process is to end.

        Args:
            failure: what its thread is to raise.
        """
        if self._failure is not None or os.getpid() != self._process:
            return
        self._failure = failure
        _exit_handler()
        # A thread of its own: the one that trains may stand in a call that never returns.
        threading.Thread(target=self._run, name="hytrain-end", daemon=True).start()

    def _run(self) -> None:
        begin = time.monotonic()
        was_raised = False
        while not self._told.wait(0.25):
            passed = time.monotonic() - begin
            if self._thread not in sys._current_frames():  # pyright: ignore[reportPrivateUsage]
                return
            if passed > STUCK_SECONDS:
                self._end_here("it did not come out of where it stood")
                return
            if not was_raised and passed > RAISE_SECONDS:
                was_raised = not is_in_torch_distributed(self._thread)
                if was_raised:
                    kind = self._exception()
                    with self._raising:
                        if not self._told.is_set():
                            _raise_in(self._thread, kind)
        self._see_it_out()

    def _exception(self) -> type[BaseException]:
        """The failure as a class, which is what can be raised in another thread."""
        failure, told = self._failure, self._told
        assert failure is not None

        def begin(error: BaseException, *_arguments: object) -> None:
            told.set()
            BaseException.__init__(error, str(failure))

        kind = type(failure)
        return type(
            kind.__name__,
            (kind,),
            {"__init__": begin, "__module__": kind.__module__, "__qualname__": kind.__qualname__},
        )

    def _see_it_out(self) -> None:
        """Clean-up after the failure must not wait for the others again."""
        since: float | None = None
        while True:
            time.sleep(0.5)
            if not self._is_held():
                since = None
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > STUCK_SECONDS:
                self._end_here("it waits for other ranks on its way out")
                return

    def _is_held(self) -> bool:
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code.co_name in ("destroy", "destroy_process_group"):
                return True
            frame = frame.f_back
        return is_in_torch_distributed(self._thread)

    def _end_here(self, why: str) -> None:
        failure = self._failure
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        with suppress(Exception):
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            kind = type(failure)
            _flush()
            # Clean-up code may have redirected Python's own stream (seen in destroy()).
            text = (
                f"Traceback (most recent call last):\n{stack}"
                f"{kind.__module__}.{kind.__qualname__}: {failure}\n"
                f"(This process is ended: {why}.)\n"
            )
            os.write(2, text.encode(errors="replace"))
        self._end(1)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Has a thread raise ``kind`` at its next line; None: not any more."""
    exception = ctypes.py_object(kind) if kind is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), exception)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


_is_limited = False


def limit_exit(seconds: float) -> None:
    """The process ends within seconds, whatever holds it. The first limit is the one."""
    global _is_limited
    if _is_limited:
        return
    _is_limited = True
    with suppress(Exception):
        # A thread of C: it needs no interpreter, which may be gone by then.
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)


def exit_with(code: int) -> None:
    """The interpreter's own end is left out, once handlers of atexit have run.

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


_has_handler = False


def _exit_handler() -> None:
    """Also where the failure has been caught, the end of the process must come."""
    global _has_handler
    if _has_handler:
        return
    _has_handler = True
    process = os.getpid()

    def limit() -> None:
        if os.getpid() == process:
            limit_exit(CAUGHT_SECONDS)

    with suppress(Exception):  # the interpreter may be ending already
        atexit.register(limit)
