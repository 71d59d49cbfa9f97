"""Optimizers that the script has not destroyed are closed before the interpreter ends."""

from __future__ import annotations

import atexit
import itertools
import sys
import threading
import weakref
from contextlib import ExitStack
from typing import Any, cast

from hytrain.checkpoint.async_save import AsyncSaver
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer

_built: weakref.WeakValueDictionary[int, HyTrainZeroOptimizer] = weakref.WeakValueDictionary()
"""In the order of their engines."""
_number = itertools.count()


def close_at_exit(optimizer: HyTrainZeroOptimizer) -> None:
    """Stops the worker when the interpreter ends without destroy(): it would abort otherwise.

    One function for all engines: a process keeps what it calls at its end, and builds many.
    """
    number = next(_number)
    if number == 0:
        atexit.register(_close_all)
    _built[number] = optimizer


_savers: weakref.WeakSet[AsyncSaver] = weakref.WeakSet()
_waits = False
"""Whether the end of the process waits for saves."""


def finish_save_at_exit(saver: AsyncSaver) -> None:
    """A save that the script's end finds at work is finished, as long as the process can.

    Handlers of atexit would be too late: before them the interpreter ends all pools of threads, and
    the save could neither copy nor write any more. What ends those is called last of its kind.
    """
    global _waits
    if not _waits:
        _waits = True
        cast("Any", threading)._register_atexit(_finish_saves)
    _savers.add(saver)


def _finish_saves() -> None:
    for saver in list(_savers):
        saver.close(abandon=is_failing())


def is_failing() -> bool:
    """Whether an exception is on its way out, or has ended the script."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None


def _close_all() -> None:
    # The last one first; one that cannot be closed does not keep the others from it.
    with ExitStack() as stack:
        for optimizer in list(_built.values()):
            stack.callback(optimizer.destroy)
            stack.callback(optimizer.collectives.leave)
