"""A thread that tells other ranks of a failure here, and this rank of a failure there.

Without it, a rank that has failed leaves the others in a collective until the process group's
timeout, half an hour by default. Ranks meet at the process group's own store, which no collective
and no device takes part in: nothing on the way of a step waits for anything.

- Each rank counts its collectives and remembers what the last ones were. A rank that waits for
  long asks all to publish theirs. Two that have different ones at one number can never meet.
- An exception that ends a rank's process, or leaves one of its steps in the middle, is published
  with its text. The others raise it, with the rank's number.

Collectives of NCCL are given up by aborting the group. Gloo's cannot be interrupted: a thread of
their own issues them and waits, and whoever wanted one waits for that thread, and may leave.
"""

from __future__ import annotations

import itertools
import json
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
_HISTORY = 1024
_USUAL = 32
"""Waits that tell how long one usually takes: a step's backward may be longer than patience."""
_MOST_POLLS = 16
"""Between two looks at what all others are doing."""
_RETRIES = 3

_numbers = itertools.count()
"""Watches are made by all ranks in one order, engine by engine."""


class Store(Protocol):
    """What is needed of torch.distributed's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """A key's value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are set."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Unsets a key."""
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
    ) -> None:
        """Starts the thread.

        Args:
            rank: this rank.
            world_size: ranks of the group.
            connect: makes a connection of the thread's own to the store that the ranks share.
            abort: ends the collectives that are under way, where they can be ended.
            group: the same for the ranks of this group, and another for those of others.
            can_interrupt: whether collectives can be ended.
        """
        self._rank = rank
        self._world_size = world_size
        self._connect = connect
        self._abort = abort
        self._can_interrupt = can_interrupt
        self._lane = Lane()
        self._prefix = f"hytrain/watch/{group}/{next(_numbers)}"
        self._process = os.getpid()
        self._issued = 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=_HISTORY)
        self._waits_since: float | None = None
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._told = False
        self._told_last = False
        self._trouble_since: float | None = None
        self._failure: RankFailedError | OutOfStepError | None = None
        self._failed = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # of the store
        self._store = connect()
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
        # In one piece: the thread may look at any moment.
        self._recent.append((self._issued, what))
        self._issued += 1
        if self._told:
            self._take_back()

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
        with suppress(Exception), self._lock:
            self._store.set(f"{self._prefix}/trouble", "1")
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
        notice = {"text": f"{type(error).__name__}: {error}", "final": final}
        self._told_last = final
        # Whatever happens here must not hide the error itself.
        with suppress(Exception), self._lock:
            self._store.set(f"{self._prefix}/notice/{self._rank}", json.dumps(notice))
            self._store.set(f"{self._prefix}/trouble", "1")
            self._told = True

    def _take_back(self) -> None:
        self._told = False
        with suppress(Exception), self._lock:
            self._store.delete_key(f"{self._prefix}/notice/{self._rank}")

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
                    with suppress(Exception), self._lock:
                        self._store = self._connect()
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
        since = self._waits_since
        patience = max(PATIENCE_SECONDS, 3.0 * max(self._usual, default=0.0))
        is_late = since is not None and time.monotonic() - since > patience
        with self._lock:
            if is_late:
                self._store.set(f"{self._prefix}/trouble", "1")
            elif not self._is_trouble():
                return False
            self._publish()
            notices = self._read("notice")
            failure = self._failure_of(notices, is_late=is_late)
            failure = failure or self._mismatch(self._read("history"))
        if failure is not None:
            self._fail(failure)
        return True

    def _is_trouble(self) -> bool:
        """Whether a rank has asked what the others are doing, or has something to say."""
        if not self._store.check([f"{self._prefix}/trouble"]):
            self._trouble_since = None
            return False
        now = time.monotonic()
        if self._trouble_since is None:
            self._trouble_since = now
        elif now - self._trouble_since > 3 * PATIENCE_SECONDS:
            # It has passed, it seems; whoever is still in trouble says so again.
            self._store.delete_key(f"{self._prefix}/trouble")
        return True

    def _publish(self) -> None:
        recent = list(self._recent)
        names = sorted({what for _, what in recent})
        number_of = {name: number for number, name in enumerate(names)}
        history = {
            "first": recent[0][0] if recent else 0,
            "names": names,
            "recent": [number_of[what] for _, what in recent],
        }
        self._store.set(f"{self._prefix}/history/{self._rank}", json.dumps(history))

    def _read(self, kind: str) -> dict[int, dict[str, Any]]:
        """What other ranks have published of a kind."""
        found: dict[int, dict[str, Any]] = {}
        for rank in range(self._world_size):
            key = f"{self._prefix}/{kind}/{rank}"
            if self._store.check([key]):
                found[rank] = json.loads(self._store.get(key))
        return found

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
        mine = _by_number(histories[self._rank])
        for rank, other in histories.items():
            for number, there in _by_number(other).items():
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


def _by_number(history: dict[str, Any]) -> dict[int, str]:
    """What a rank's collectives were, by their number."""
    names = history["names"]
    return dict(enumerate((names[number] for number in history["recent"]), history["first"]))


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
