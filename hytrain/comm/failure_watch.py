"""A thread that tells other ranks of a failure here, and this rank of a failure there.

Without it, a rank that has failed leaves the others in a collective until the process group's
timeout, half an hour by default. Ranks meet at the process group's own store, which no collective
and no device takes part in, and by connections of their own (process_monitor.py), which need no
store: nothing on the way of a step waits for anything.

- Each rank counts its collectives and remembers what the last ones were. A rank that waits for
  long asks all to publish theirs. Two that have different ones at one number can never meet.
- An exception that ends a rank's process, or leaves one of its steps in the middle, is published
  with its text. The others raise it, with the rank's number.
- A process that is gone without a word was killed or has crashed. It comes before the failures of
  those who only lost their connection to it (failure_messages.py).
- A rank that waits for others which only have not come yet says so, and where they stand: they may
  be slow, or it may be where they never come, alone with weights that all ranks gather together.
  One that stands in a collective of the script's own, which waits for this rank, never comes.

Collectives of NCCL are given up by aborting the group. Gloo's cannot be interrupted: a separate
thread issues them and waits, and the training thread waits for that thread, and may give up. A
process that stands where neither helps is ended (process_exit.py).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from hytrain.comm import crash_report
from hytrain.comm.call_sites import ThreadSampler
from hytrain.comm.daemon_executor import DaemonExecutor
from hytrain.comm.deadlock import never_comes, standings_of
from hytrain.comm.failure_messages import Kind, Words, is_connection_error
from hytrain.comm.process_exit import Ending
from hytrain.comm.process_monitor import CONFIRM_SECONDS, ProcessMonitor
from hytrain.comm.processes import Process
from hytrain.comm.rank_status import History, StatusStore, Store, by_number
from hytrain.errors import OutOfStepError, RankFailedError

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
"""How long a rank waits at least before it says which ranks it waits for."""
_USUAL = 32
"""Waits that tell how long one usually takes: a step's backward may be longer than patience."""
_MOST_POLLS = 16
"""Between two looks at what all others are doing."""
_RETRIES = 3
_EXPLAIN_POLLS = 12
"""For which a collective that has broken off waits for its reason."""
_CLOSING_SECONDS = 5.0
_OVER_SECONDS = 1.0
_STORE_POLLS = 4
"""For which a store that may be gone is waited for, where something else waits behind it."""


class Mark(Protocol):
    """A place in a device's queue, such as torch.cuda.Event."""

    def record(self) -> None:
        """It is where the queue ends now."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


@dataclass(frozen=True, slots=True)
class Surveillance:
    """What a real process has, and a watch in a test may do without.

    Attributes:
        process: this one, for the others to look at.
        ending: of this process, when the job is lost.
        global_rank: of the group's ranks.
        group_name: of the process group.
    """

    process: Process
    ending: Ending
    global_rank: Callable[[int], int]
    group_name: str


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
        surveillance: Surveillance | None = None,
    ) -> None:
        """Starts the thread; the calling one is that which trains.

        Args:
            rank: this rank.
            world_size: ranks of the group.
            connect: makes a connection of the thread's own to the store that the ranks share.
            abort: ends the collectives that are under way, where they can be ended.
            group: the same for the ranks of this group, and another for those of others.
            can_interrupt: whether collectives can be ended.
            mark: of the queue that collectives are issued to, where a device has one.
            surveillance: of processes; None: ranks know of each other by the store only.
        """
        self._rank = rank
        self._world_size = world_size
        self._abort = abort
        self._can_interrupt = can_interrupt
        self._mark = mark
        self._marked_at: float | None = None
        self._lane = DaemonExecutor()
        self._process = os.getpid()
        self._history = History()
        self._waits_since: float | None = None
        self._warned_of: float | None = None
        self._stale_of: float | None = None
        self._stale: dict[int, int] = {}
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._told = False
        self._told_last = False
        self._has_left = False
        self._failure: RankFailedError | OutOfStepError | None = None
        # The watching thread and the process monitor's both decide: without the lock both could
        # find a cause, and abort and report twice. _fail() takes it again where it is held.
        self._deciding = threading.RLock()
        self._failed = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._words = Words(rank)
        self._words_read_at = -math.inf
        self._must_read = False
        self._is_store_lost = False
        self._store_uses: list[threading.Thread] = []
        self._sampler = ThreadSampler(threading.get_ident())
        self._surveillance = surveillance
        self._status = StatusStore(rank, world_size, connect, group=group)
        self._monitor: ProcessMonitor | None = None
        if surveillance is not None:
            self._monitor = ProcessMonitor(
                rank,
                world_size,
                surveillance.process,
                self._status,
                self._words,
                state=lambda: self._history.last,
                notice=self._take_notice,
            )
        self._thread = threading.Thread(target=self._run, name="hytrain-watch", daemon=True)
        self._thread.start()
        crash_report.follow(self)

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
            self._say("back", "", final=False)

    def check(self) -> None:
        """Raises what has been found; costs nothing where nothing has.

        Raises:
            RankFailedError: another rank has failed.
            OutOfStepError: the ranks' collectives cannot meet any more.
        """
        if self._failure is not None:
            self._hold_ending()
            raise self._failure

    @contextmanager
    def waiting(self) -> Generator[None]:
        """The host waits for other ranks while it lasts.

        Raises:
            RankFailedError, OutOfStepError: in vain.
        """
        # Read by the watching thread without a lock: one assignment, of a float or None.
        begin = self._waits_since = time.monotonic()
        try:
            yield
        except Exception as error:
            # What was read of a device whose collectives were aborted is no error of its own.
            if self._failure is not None and error is not self._failure:
                self._hold_ending()
                raise self._failure from error
            raise
        finally:
            self._waits_since = None
        # A device whose collectives were aborted goes on with garbage.
        self.check()
        self._usual.append(time.monotonic() - begin)

    def run(self, collective: Callable[[], object]) -> None:
        """Runs a collective to its end, or until that will not come.

        Raises:
            RankFailedError, OutOfStepError: it will not end.
            RuntimeError: it has failed, and no rank has given a reason.
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
                # In turns with check(): a wait without a limit would hold this thread in a
                # collective that a failed rank never joins.
                while not ended.wait(POLL_SECONDS):
                    self.check()
            ended.result()
        except (RankFailedError, OutOfStepError):
            raise
        except Exception as error:
            failure = self.explain(error) or self._lose_connection(error)
            if failure is None:
                raise
            raise failure from error

    def _lose_connection(self, error: Exception) -> RankFailedError | OutOfStepError | None:
        """Fails where a connection broke off to a rank whose watch cannot say why."""
        monitor = self._monitor if is_connection_error(error) else None
        ranks = {} if monitor is None else monitor.unheard(str(error))
        if ranks:
            names = " or ".join(ranks.values())
            only = next(iter(ranks)) if len(ranks) == 1 else None
            text = (
                f"the connection to {names} was lost, and its watch has not answered since the "
                "start: a firewall forbids the ranks' watches to connect, so that it cannot be "
                "told whether that rank has failed or was killed, or its host is gone. See its "
                f"log. Start the job again from a checkpoint (torch says: {error})"
            )
            self._fail(RankFailedError(text), about=only, is_seen_here_only=only is None)
            self._hold_ending()
        return self._failure

    def explain(self, error: Exception) -> RankFailedError | OutOfStepError | None:
        """What is behind a collective that has failed; None where no rank has said anything."""
        if self._failure is None and not self._closed.is_set():
            is_lost = is_connection_error(error)
            self.tell(error, final=False) if is_lost else self._shortly(self._status.ask)
            # A rank that has left will not come to this one. Ranks tell before they go; what
            # the others do they say when they look next.
            self._waits_since = -math.inf
            self._wake.set()
            self._failed.wait((_EXPLAIN_POLLS if is_lost else 3) * POLL_SECONDS)
            self._waits_since = None
        if self._failure is not None:
            self._hold_ending()
        return self._failure

    def tell(self, error: BaseException, *, final: bool) -> None:
        """Tells the other ranks of a failure here.

        Args:
            error: the failure.
            final: the process ends; otherwise others wait for a while, as this rank may come back.
        """
        if self._closed.is_set() or isinstance(error, (RankFailedError, OutOfStepError)):
            return
        is_forked = os.getpid() != self._process  # a child's mistakes are its own
        # What happens after another rank's failure is no cause of anything.
        if is_forked or self._told_last or self._failure is not None:
            return
        self._told_last = final
        kind = "lost" if is_connection_error(error) else "error"
        if final and kind == "error":
            self._hold_ending()
        self._say(kind, f"{type(error).__name__}: {error}", final=final)
        self._told = True

    def leave(self, text: str = "") -> None:
        """This rank makes no collectives any more: no failure, but for those who wait for it.

        Args:
            text: why, where that is not what it should be.
        """
        is_over = self._closed.is_set() or self._failure is not None or self._has_left
        if not is_over and os.getpid() == self._process:
            self._has_left = True
            self._say("left", text, final=True)

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        if self._closed.is_set():
            return
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            # On its way out, through clean-up code; it may never reach the excepthook.
            self.tell(error, final=True)
            if is_connection_error(error):
                self.explain(error)
        self.leave()
        self._closed.set()
        self._wake.set()
        crash_report.forget(self)
        self._lane.close()
        if self._monitor is not None:
            self._monitor.close()
        # Without the joins a thread could be in the store's C++ when the interpreter ends, which
        # aborts the process. With a limit: the store may be gone. A thread cannot join itself.
        is_over = self._failure is not None or self._is_store_lost
        until = time.monotonic() + (_OVER_SECONDS if is_over else _CLOSING_SECONDS)
        for thread in (self._thread, *self._store_uses):
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, until - time.monotonic()))

    def _hold_ending(self) -> None:
        """An exception is on its way: none needs to be brought about."""
        if self._surveillance is not None:
            self._surveillance.ending.told()

    # -- any thread ----------------------------------------------------------------------------

    def _say(self, kind: Kind, text: str, *, final: bool, about: int | None = None) -> None:
        # Whatever happens here must not hide the error itself.
        with suppress(Exception):
            issued = self._history.issued
            word = self._words.say(kind, text, final=final, about=about, issued=issued)
            if self._monitor is not None:
                self._monitor.say(word)
                # Every use of a store that has ended in order is a warning of torch's.
                if kind == "left" and self._monitor.hears_all():
                    return
            self._shortly(self._write_down)

    def _write_down(self) -> None:
        self._status.say(self._words.own())
        self._status.ask()

    def _shortly(self, use: Callable[[], None], *, is_short: bool = True) -> bool:
        """Uses the store, and waits for it for a little while only: it may be gone."""
        if self._is_store_lost:
            return False
        done = threading.Event()

        def run() -> None:
            with suppress(Exception):
                use()
            done.set()

        # A thread of its own: the store's calls cannot be interrupted, and the caller must go on
        # although the process that holds the store is gone.
        thread = threading.Thread(target=run, name="hytrain-store", daemon=True)
        if is_short:  # else it may wait for minutes, and that through the end of the process
            self._store_uses = [*(each for each in self._store_uses if each.is_alive()), thread]
        thread.start()
        return done.wait(_STORE_POLLS * POLL_SECONDS)

    def _take_notice(self) -> None:
        """Something may have been said, or a process has gone."""
        with suppress(Exception):
            self._decide(None)

    def _decide(self, number: int | None) -> None:
        """Fails where another rank has.

        Args:
            number: of the collective that this rank has waited for longer than is usual.
        """
        with self._deciding:
            if self._failure is not None or self._closed.is_set():
                return
            cause = self._words.cause(self._gone(is_late=number is not None), number=number)
            if cause is not None:
                about, text = cause
                self._fail(RankFailedError(text), about=about)

    def _gone(self, *, is_late: bool) -> dict[int, str]:
        """Ranks whose processes are gone, where their last words would have come."""
        if self._monitor is None:
            return {}
        gone: dict[int, str] = {}
        for rank, text in self._monitor.gone().items():
            needs_store = not self._monitor.hears(rank) and not self._is_store_lost
            gone_since = time.monotonic() - self._monitor.gone_for(rank)
            if needs_store and self._words_read_at < gone_since + CONFIRM_SECONDS:
                self._must_read = True
                self._wake.set()
            else:
                gone[rank] = text
        return {**(self._monitor.unreachable() if is_late else {}), **gone}

    def _fail(
        self,
        failure: RankFailedError | OutOfStepError,
        *,
        about: int | None = None,
        is_seen_here_only: bool = False,
    ) -> None:
        # Who calls may have judged without the lock. Another thread may have failed or closed the
        # watch since then: a second failure would be reported and aborted for, and replace the
        # first, which this rank may be raising. No deadlock: what is waited for in here (the store,
        # the abort) is done by threads that do not decide, and only for so long.
        with self._deciding:
            if self._failure is not None or self._closed.is_set():
                return
            logger.error("%s", failure)
            if about is not None:
                self._say("found", str(failure), final=True, about=about)
            elif is_seen_here_only:
                self._say("error", f"{type(failure).__name__}: {failure}", final=True)
            # Before any thread is woken: it looks for the failure at once.
            self._failure = failure
            if self._surveillance is not None:
                crash_report.found(failure)
                self._surveillance.ending.require(failure)
            if self._can_interrupt:
                # It may take long, or for ever: in a thread that is not waited for to its end.
                aborting = threading.Thread(target=self._end_collectives, daemon=True)
                aborting.start()
                aborting.join(timeout=POLL_SECONDS)
            self._failed.set()
            self._wake.set()

    def _end_collectives(self) -> None:
        with suppress(Exception):
            self._abort()

    # -- the watching thread -------------------------------------------------------------------

    def _run(self) -> None:
        failures, polls = 0, 1
        while self._failure is None:
            if self._wake.wait(polls * POLL_SECONDS):
                self._wake.clear()
                polls = 1
            if self._closed.is_set():
                return
            if self._is_store_lost:
                self._decide(self._late_number(self._late_since(self._patience())))
                continue
            try:
                # All ask all: less and less often.
                polls = min(2 * polls, _MOST_POLLS) if self._look() else 1
                failures = 0
            except Exception as error:
                # The store has gone with the process that holds it, or a connection was lost.
                failures += 1
                if failures < _RETRIES:
                    self._shortly(self._status.reconnect, is_short=False)
                else:
                    self._lose_store(error)

    def _lose_store(self, error: Exception) -> None:
        self._is_store_lost = True
        # A process that was killed is seen by other means.
        for _ in range(_EXPLAIN_POLLS):
            if self._closed.is_set() or self._failed.wait(POLL_SECONDS):
                break
        with self._deciding:
            is_over = self._failure is not None or self._closed.is_set()
            # The store's holder has ended in order: there is nothing to share any more.
            if is_over or self._words.has_anyone_left():
                return
            self._fail(
                RankFailedError(
                    f"the process group's store cannot be reached any more ({error}): the rank "
                    "that holds it, mostly rank 0, or its host is gone. Start the job again from a "
                    "checkpoint"
                )
            )

    def _patience(self) -> float:
        return max(PATIENCE_SECONDS, 3.0 * max(self._usual, default=0.0))

    def _late_number(self, since: float | None) -> int | None:
        return None if since is None else self._history.last[0]

    def _look(self) -> bool:
        """Looks for a failure; whether there was reason to."""
        patience = self._patience()
        since = self._late_since(patience)
        if since is not None:
            self._status.ask()
        elif not (self._status.is_asked(forget_after=3 * PATIENCE_SECONDS) or self._must_read):
            return False
        self._must_read = False
        waited = 0.0 if since is None else min(time.monotonic() - since, 1e9)
        self._status.publish(self._history, self._sampler.look(), waited)
        begin = time.monotonic()
        for word in self._status.words():
            self._words.hear(word)
        self._words_read_at = begin
        self._decide(self._late_number(since))
        histories = self._status.histories()
        if self._failure is not None:
            return True
        failure = self._mismatch(histories)
        if failure is not None:
            self._fail(failure)
        elif since is not None:
            if since != self._stale_of:
                # What is on the store now was written for an earlier wait.
                self._stale_of = since
                self._stale = {rank: history["serial"] for rank, history in histories.items()}
            self._judge_others(since, max(WARN_SECONDS, patience), histories)
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
        except RuntimeError:  # a broken device is reported by the code that uses it
            return None

    def _judge_others(
        self, since: float, seconds: float, histories: dict[int, dict[str, Any]]
    ) -> None:
        """Says once a wait which ranks have not come to where this one is; fails if one cannot."""
        waited = time.monotonic() - since
        if not seconds < waited < math.inf:
            return
        number, what = self._history.last
        issued = {
            rank: len(history["recent"]) + history["first"] for rank, history in histories.items()
        }
        behind = [r for r in range(self._world_size) if issued.get(r, 0) <= number]
        if not behind:
            return
        here = f"rank {self._rank} has waited for {waited:.0f} s at its collective number "
        here += f"{number + 1}, {what}; not there yet: ranks {behind}."
        fresh = {r: h for r, h in histories.items() if h["serial"] != self._stale.get(r)}
        surveillance = self._surveillance
        if surveillance is not None and len(fresh) == self._world_size:
            stuck = never_comes(
                self._rank,
                behind,
                fresh,
                waited,
                global_rank=surveillance.global_rank,
                group_name=surveillance.group_name,
            )
            if stuck is not None:
                self._fail(OutOfStepError(f"{here} {stuck}"), is_seen_here_only=True)
                return
        # Who does not answer for long holds the interpreter, or is stopped.
        has_answered = all(rank in fresh for rank in behind)
        if since == self._warned_of or not (has_answered or waited > seconds + PATIENCE_SECONDS):
            return
        self._warned_of = since
        lost = self._monitor.lost_hosts() if self._monitor is not None else {}
        if not lost.keys().isdisjoint(behind):
            logger.warning(
                "%s Of %s. Is a host, or the network between, down? The job ends when it has not "
                "answered for a minute",
                here,
                "; ".join(lost[rank] for rank in behind if rank in lost),
            )
            return
        standings = standings_of(fresh)
        places = "".join(f" Rank {r} stands at {standings[r]}." for r in behind if r in standings)
        logger.warning(
            "%s They may only be slow. But if this rank alone uses the model's weights, as with "
            "'if rank == 0: evaluate(model)', they never come: then call engine.synchronize() on "
            "all ranks before.%s",
            here,
            places,
        )

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
