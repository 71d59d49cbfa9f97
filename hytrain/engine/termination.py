"""The end of a process. On SIGTERM: a checkpoint after the next step, the same on all ranks.

The signal's handler only sets a flag. At the end of its step a rank whose flag is set writes into
the process group's store which step will be the last: the next one. Every other rank has yet to
make that step and cannot finish it without this rank, so it finds the entry when it has made it.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, cast

from torch.distributed import distributed_c10d

from hytrain.checkpoint.async_save import AsyncSaver
from hytrain.comm.collectives import ShardCollectives
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer

logger = logging.getLogger(__name__)

EXIT_STATUS = 128 + signal.SIGTERM
"""The status that shells report for a process ended by SIGTERM, and that launchers expect."""

_KEY = "hytrain/last_step"


class Termination:
    """Listens for SIGTERM from its construction to :meth:`close`."""

    def __init__(self, collectives: ShardCollectives, *, is_ordered: bool) -> None:
        """A collective. ``is_ordered``: no rank's host ends a step before all ranks have computed
        its gradients; otherwise the ranks ask each other after every step.
        """
        self._collectives = collectives
        self._is_ordered = is_ordered
        self._asked = threading.Event()
        self._last: int | None = None
        self._process = os.getpid()
        self._store: Any = None
        self._key = ""
        if collectives.world_size > 1 and is_ordered:
            shared: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
            self._store = shared
            # A key of this engine: a process may build several.
            self._key = f"{_KEY}/{collectives.object_from_first(os.urandom(8).hex(), 'a key')}"
        self._before: Any = signal.SIG_DFL
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._note)
        else:
            logger.warning(
                '"hytrain.checkpoint.sigterm_dir" has no effect: the engine is not built in the '
                "main thread, the only one that can handle signals"
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._process:
            # A data loader's worker. Launchers signal whole process groups, and training would fail
            # for want of data before it has saved. A second signal ends the worker: that one is
            # sent by the data loader.
            signal.signal(number, signal.SIG_DFL)
            return
        self._asked.set()

    def is_due(self, step: int) -> bool:
        """Whether training ends after this step; a collective, to be called after each step."""
        if self._collectives.world_size == 1:
            return self._asked.is_set()
        if not self._is_ordered:
            return bool(self._collectives.maximum([int(self._asked.is_set())])[0])
        if self._last is None and self._asked.is_set():
            self._store.compare_set(self._key, "", str(step + 1))
        if self._last is None and self._store.check([self._key]):
            self._last = int(self._store.get(self._key))
        return self._last is not None and step >= self._last

    def finish(self, save: Callable[[], None]) -> None:
        """Saves and ends the process.

        Raises:
            SystemExit: with :data:`EXIT_STATUS`, even if nothing could be saved.
        """
        try:
            save()
        except Exception:
            logger.exception("SIGTERM: no checkpoint could be saved")
        raise SystemExit(EXIT_STATUS)

    def close(self) -> None:
        """Restores the former handler of SIGTERM. May be called twice."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, self._before)


_built: weakref.WeakValueDictionary[int, HyTrainZeroOptimizer] = weakref.WeakValueDictionary()
"""Optimizers in the order in which they were built."""
_number = itertools.count()


def close_at_exit(optimizer: HyTrainZeroOptimizer) -> None:
    """Stops the worker if the interpreter ends without destroy(): it would abort otherwise.

    One exit handler serves all engines: it is never freed, and a process may build many engines.
    """
    number = next(_number)
    if number == 0:
        atexit.register(_close_all)
    _built[number] = optimizer


_savers: weakref.WeakSet[AsyncSaver] = weakref.WeakSet()
_waits = False
"""Whether the end of the process waits for saves."""


def finish_save_at_exit(saver: AsyncSaver) -> None:
    """Makes the script's end wait for a running save, while the process can still finish it.

    Handlers of atexit would be too late: before them the interpreter ends all thread pools, and the
    save could neither copy nor write any more. Of the handlers of the kind registered here, the one
    that ends the pools runs last.
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
    """Whether an exception is propagating, or has ended the script."""
    return sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None


def _close_all() -> None:
    # The last one first; one that cannot be closed does not keep the others open.
    with ExitStack() as stack:
        for optimizer in list(_built.values()):
            stack.callback(optimizer.destroy)
            stack.callback(optimizer.collectives.leave)
