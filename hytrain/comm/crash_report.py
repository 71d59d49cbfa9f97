"""What ends this process is told to the other ranks before it is shown here."""

from __future__ import annotations

import os
import sys
import time
import weakref
from types import TracebackType
from typing import Protocol

from hytrain.comm.failure_messages import is_connection_error
from hytrain.comm.process_exit import exit_with
from hytrain.errors import OutOfStepError, RankFailedError

_READ_SECONDS = 1.5
"""In which others read a store that ends with this process."""


class Watch(Protocol):
    """What tells the others; see failure_watch.py."""

    def tell(self, error: BaseException, *, final: bool) -> None:
        """Tells of a failure here."""
        ...

    def explain(self, error: Exception) -> RankFailedError | OutOfStepError | None:
        """The other rank's failure that is behind one here."""
        ...


_open_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_failures: list[RankFailedError | OutOfStepError] = []
"""What this process has found; the first is the reason of its end."""
_hooked = False


def follow(watch: Watch) -> None:
    """What ends this process is told to a watch, until :func:`forget`."""
    _open_watches.add(watch)
    _hook_exceptions()


def forget(watch: Watch) -> None:
    """Ends :func:`follow`."""
    _open_watches.discard(watch)


def found(failure: RankFailedError | OutOfStepError) -> None:
    """Another rank has failed, and this process ends for that."""
    _failures.append(failure)


def _hook_exceptions() -> None:
    """What ends the process is told to the other ranks before it is shown here."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    show, process = sys.excepthook, os.getpid()

    def tell_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != process:
            show(kind, error, trace)
            return
        watches = list(_open_watches)
        for watch in watches:
            watch.tell(error, final=True)
        failure = _reason_of(error, watches)
        if failure is None:
            show(kind, error, trace)
        else:
            failure.__cause__ = error
            show(type(failure), failure, failure.__traceback__)
        if isinstance(error, Exception) and (_failures or is_connection_error(error)):
            exit_with(1)
        elif watches:
            # This process may hold the store: the others read it before it goes.
            time.sleep(_READ_SECONDS)

    sys.excepthook = tell_and_show


def _reason_of(
    error: BaseException, watches: list[Watch]
) -> RankFailedError | OutOfStepError | None:
    """The other rank's failure behind a collective of the script's own."""
    is_told = isinstance(error, (RankFailedError, OutOfStepError))
    if is_told or not isinstance(error, Exception) or not is_connection_error(error):
        return None
    for watch in watches:
        watch.explain(error)
    return _failures[0] if _failures else None
