"""A thread that tells other ranks of a failure here, and this rank of a failure there.

Without it, a rank that has failed leaves the others in a collective until the process group's
timeout, half an hour by default. Ranks meet at the process group's own store, which no collective
and no device takes part in: nothing on the way of a step waits for anything.

- Each rank counts its collectives and remembers what the last ones were. A rank that waits for
  long asks all to publish theirs. Two that have different ones at one number can never meet.
- An exception that ends a rank's process, or leaves one of its steps in the middle, is published
  with its text. The others raise it, with the rank's number.
- A rank that waits for others which only have not come yet says so: they may be slow, or it may be
  where they never come, alone with weights that all ranks gather together.

Collectives of NCCL are given up by aborting the group. Gloo's cannot be interrupted: a thread of
their own issues them and waits, and whoever wanted one waits for that thread, and may leave.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol

from hytrain.errors import OutOfStepError, RankFailedError
from hytrain.parallel.bulletin import BulletinBoard, History, Store, by_number
from hytrain.parallel.lane import Lane

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""How long a rank waits at least before it asks what the others are doing, or gives up on one that
has left a step in the middle and may come back."""
SAME_NUMBER = (
    "With ZeRO-2 and higher all ranks must make the same number of backward passes between two "
    "steps: where they have different numbers of micro-batches, use engine.train_batch. Start the "
    "job again from a checkpoint"
)
WARN_SECONDS = 30.0
"""How long a rank waits at least before it says whom it waits for."""
_USUAL = 32
"""Waits that tell how long one usually takes: a step's backward may be longer than patience."""
_MOST_POLLS = 16
"""Between two looks at what all others are doing."""
_RETRIES = 3


class Mark(Protocol):
    """A place in a device's queue, such as torch.cuda.Event."""

    def record(self) -> None:
        """It is where the queue ends now."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


class RankWatch:
    """Watches the ranks of one group, from one of them."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Store],
        abort: Callable[[], None],
        *,
        group: str,
        can_interrupt: bool,
        mark: Mark | None = None,
    ) -> None:
        """Starts the thread.

        Args:
            rank: this rank.
            world_size: ranks of the group.
            connect: makes a connection of the thread's own to the store that the ranks share.
            abort: ends the collectives that are under way, where they can be ended.
            group: the same for the ranks of this group, and another for those of others.
            can_interrupt: whether collectives can be ended.
            mark: of the queue that collectives are issued to, where a device has one.
        """
        self._rank = rank
        self._world_size = world_size
        self._abort = abort
        self._can_interrupt = can_interrupt
        self._mark = mark
        self._marked_at: float | None = None
        self._lane = Lane()
        self._process = os.getpid()
        self._history = History()
        self._waits_since: float | None = None
        self._warned_of: float | None = None
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._told = False
        self._told_last = False
        self._failure: RankFailedError | OutOfStepError | None = None
        self._failed = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._board = BulletinBoard(rank, world_size, connect, group=group)
        self._thread = threading.Thread(target=self._run, name="hytrain-watch", daemon=True)
        self._thread.start()
        _open_watches.add(self)
        _hook_exceptions()

    # -- the training thread -------------------------------------------------------------------

    def issue(self, what: str) -> None:
        """A collective is about to be issued; ``what`` is the same on all ranks.

        Raises:
            RankFailedError, OutOfStepError: it will not end.
        """
        self.check()
        self._history.add(what)
        if self._told:
            self._told = False
            with suppress(Exception):
                self._board.take_back()

    def check(self) -> None:
        """Raises what has been found; costs nothing where nothing has.

        Raises:
            RankFailedError: another rank has failed.
            OutOfStepError: the ranks' collectives cannot meet any more.
        """
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def waiting(self) -> Generator[None]:
        """The host waits for other ranks while it lasts.

        Raises:
            RankFailedError, OutOfStepError: in vain.
        """
        begin = self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None
        # A device whose collectives were aborted goes on with garbage.
        self.check()
        self._usual.append(time.monotonic() - begin)

    def run(self, collective: Callable[[], object]) -> None:
        """Runs a collective to its end, or until that will not come.

        Raises:
            RankFailedError, OutOfStepError: it will not end.
            RuntimeError: it has failed, and nobody knows why.
        """
        try:
            if self._can_interrupt:
                collective()
                if self._mark is not None:
                    self._mark.record()
                    self._marked_at = time.monotonic()
                return
            ended = self._lane.submit(collective)
            with self.waiting():
                while not ended.wait(POLL_SECONDS):
                    self.check()
            ended.result()
        except (RankFailedError, OutOfStepError):
            raise
        except RuntimeError as error:
            raise self._explain(error) from error

    def _explain(self, error: RuntimeError) -> RuntimeError:
        """What is behind a failed collective; ``error`` itself where nobody has said anything."""
        with suppress(Exception):
            self._board.ask()
        # Whoever has left will not come back to this one. A rank tells before it goes; what the
        # others do they say when they look next.
        self._waits_since = -math.inf
        self._wake.set()
        self._failed.wait(3 * POLL_SECONDS)
        self._waits_since = None
        return self._failure or error

    def tell(self, error: BaseException, *, final: bool) -> None:
        """Tells the other ranks of a failure here.

        Args:
            error: the failure.
            final: the process ends; otherwise others wait for a while, as this rank may come back.
        """
        if self._closed.is_set() or isinstance(error, (RankFailedError, OutOfStepError)):
            return
        is_forked = os.getpid() != self._process  # a child's mistakes are its own
        if is_forked or self._told_last:
            return
        self._told_last = final
        # Whatever happens here must not hide the error itself.
        with suppress(Exception):
            self._board.post(f"{type(error).__name__}: {error}", final=final)
            self._board.ask()
            self._told = True

    def close(self) -> None:
        """Ends the thread. May be called twice."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            # On its way out, through whoever tidies up; nobody may see it end the process.
            self.tell(error, final=True)
        self._closed.set()
        self._wake.set()
        _open_watches.discard(self)
        self._lane.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    # -- the watching thread -------------------------------------------------------------------

    def _run(self) -> None:
        failures, polls = 0, 1
        while self._failure is None:
            if self._wake.wait(polls * POLL_SECONDS):
                self._wake.clear()
                polls = 1
            if self._closed.is_set():
                return
            try:
                # All ask all: less and less often.
                polls = min(2 * polls, _MOST_POLLS) if self._look() else 1
                failures = 0
            except Exception as error:
                # The store has gone with the process that holds it, or a connection was lost.
                failures += 1
                if failures < _RETRIES:
                    self._board.reconnect()
                elif not self._closed.is_set():
                    self._fail(
                        RankFailedError(
                            f"the process group's store cannot be reached any more ({error}): the "
                            "rank that holds it, mostly rank 0, or its host is gone. Start the job "
                            "again from a checkpoint"
                        )
                    )

    def _look(self) -> bool:
        """Looks for a failure; whether there was reason to."""
        patience = max(PATIENCE_SECONDS, 3.0 * max(self._usual, default=0.0))
        since = self._late_since(patience)
        if since is not None:
            self._board.ask()
        elif not self._board.is_asked(forget_after=3 * PATIENCE_SECONDS):
            return False
        self._board.publish(self._history)
        failure = self._failure_of(self._board.notices(), is_late=since is not None)
        histories = self._board.histories()
        failure = failure or self._mismatch(histories)
        if failure is not None:
            self._fail(failure)
        elif since is not None:
            self._warn_of_others(since, max(WARN_SECONDS, patience), histories)
        return True

    def _late_since(self, patience: float) -> float | None:
        """Since when this rank, or its device, has waited, where that is longer than patience."""
        now, since = time.monotonic(), self._waits_since
        if since is not None:
            return since if now - since > patience else None
        if self._mark is None or self._marked_at is None or now - self._marked_at <= patience:
            return None
        # The host has gone on; that the device has not is seen at what was queued last.
        try:
            return None if self._mark.query() else self._marked_at
        except RuntimeError:  # a broken device is reported by whoever uses it
            return None

    def _warn_of_others(
        self, since: float, seconds: float, histories: dict[int, dict[str, Any]]
    ) -> None:
        """Says once a wait which ranks have not come to where this one is."""
        waited = time.monotonic() - since
        if since == self._warned_of or not seconds < waited < math.inf:
            return
        number, what = self._history.last
        issued = {
            rank: len(history["recent"]) + history["first"] for rank, history in histories.items()
        }
        behind = [r for r in range(self._world_size) if issued.get(r, 0) <= number]
        if not behind:
            return
        self._warned_of = since
        logger.warning(
            "rank %d has waited for %.0f s at its collective number %d, %s; not there yet: ranks "
            "%s. They may only be slow. But if this rank alone uses the model's weights, as with "
            "'if rank == 0: evaluate(model)', they never come: then call engine.synchronize() on "
            "all ranks before",
            self._rank,
            waited,
            number + 1,
            what,
            behind,
        )

    def _failure_of(
        self, notices: dict[int, dict[str, Any]], *, is_late: bool
    ) -> RankFailedError | None:
        for rank, notice in notices.items():
            # Where all have failed alike they may all go on; nobody waits for anybody.
            may_come_back = self._rank in notices or not is_late
            if rank == self._rank or (not notice["final"] and may_come_back):
                continue
            return RankFailedError(
                f"rank {rank} has failed, and the others cannot go on without it. It says: "
                f"{notice['text']}\nStart the job again from a checkpoint"
            )
        return None

    def _mismatch(self, histories: dict[int, dict[str, Any]]) -> OutOfStepError | None:
        mine = by_number(histories[self._rank])
        for rank, other in histories.items():
            for number, there in by_number(other).items():
                here = mine.get(number, there)
                if here != there:
                    return OutOfStepError(
                        f"the ranks are out of step: collective number {number + 1} is {here} on "
                        f"rank {self._rank} and {there} on rank {rank}. "
                        f"{SAME_NUMBER}"
                    )
        return None

    def _fail(self, failure: RankFailedError | OutOfStepError) -> None:
        logger.error("%s", failure)
        self._failure = failure
        self._failed.set()
        if self._can_interrupt:
            with suppress(Exception):
                self._abort()


_open_watches: weakref.WeakSet[RankWatch] = weakref.WeakSet()
_hooked = False


def _hook_exceptions() -> None:
    """What ends the process is told to the other ranks before it is shown here."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    show = sys.excepthook

    def tell_and_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        told = [watch.tell(error, final=True) for watch in list(_open_watches)]
        show(kind, error, trace)
        if told:
            # This process may hold the store: the others read it before it goes.
            time.sleep(3 * POLL_SECONDS)

    sys.excepthook = tell_and_show
