"""A thread that tells other ranks of a failure here, and this rank of a failure there.

Without it, a rank that has failed leaves the others in a collective until the process group's
timeout, half an hour by default. No step ever waits for the thread itself.

- A rank puts what it says (outbox.py) on the process group's store (rank_status.py,
  store_looks.py): the text of an exception that ends its process, or that leaves one of its steps
  in the middle. The other ranks raise it.
- A process that is gone without a word was killed or has crashed (presence.py). The kernel tells of
  those on this host (local_processes.py), connections of those on others (peers.py).
- Each rank counts its collectives and remembers what the last ones were. A rank that waits long
  (waits.py) asks all ranks to publish theirs. Two ranks with different collectives of one number
  can never meet.
- If the others just have not come yet, a rank that waits logs it, and where they stand. They may be
  slow, or never come: this rank may be alone in using weights that all ranks gather together.

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
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from hytrain.comm import process_exit
from hytrain.comm.call_sites import place_of
from hytrain.comm.daemon_executor import DaemonExecutor
from hytrain.comm.failure_messages import Kind, Word, Words, is_connection_error
from hytrain.comm.local_processes import Process
from hytrain.comm.outbox import Outbox
from hytrain.comm.peers import Peers
from hytrain.comm.presence import Presence
from hytrain.comm.process_exit import Ending
from hytrain.comm.rank_status import History, News, StatusStore
from hytrain.comm.store_looks import StoreLooks
from hytrain.comm.waits import Waits
from hytrain.errors import OutOfStepError, RankFailedError
from hytrain.testing import faults

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
ASK_SECONDS = 2.0
"""Time between two requests of a rank that waits."""
WARN_SECONDS = 30.0
"""How long a rank waits at least before it says which ranks it waits for."""
EXPLAIN_SECONDS = 6.0
"""How long a collective that has broken off waits for the reason."""
STORE_SECONDS = 4.0
"""How long a rank tries to reconnect to a store that was lost, or waits for its answer."""
CONFIRM_SECONDS = 0.4
"""How long a process must be gone before it is reported: its last words may be on the way."""
UNREACHABLE_SECONDS = 60.0
"""How long a host does not answer before ranks that wait for it give it up. (That it does not is
known after a quarter of a minute.)"""
STORE_UNREACHABLE_SECONDS = 75.0
"""The same for the store, counted from its last answer."""
SAME_NUMBER = (
    "With ZeRO-2 and higher all ranks must make the same number of backward passes between two "
    "steps: where they have different numbers of micro-batches, use engine.train_batch. Start the "
    "job again from a checkpoint"
)
_MOST_TEXT = 4000
_CLOSING_SECONDS = 5.0


@dataclass(slots=True)
class _Requests:
    """A rank's requests to the others in its last long wait, which began at ``since``."""

    since: float = 0.0
    number: int = 0
    asked_at: float = -math.inf
    warned_of: float | None = None
    """When the wait began for which it has last logged that ranks are missing."""

    def ask(self, now: float, since: float, patience: float) -> bool:
        """Counts one more request; returns whether to log now which ranks this one waits for."""
        self.number = self.number + 1 if since == self.since else 1
        self.asked_at, self.since = now, since
        # The two earlier requests have given the others time to publish.
        is_due = self.number > 2 and now - since > max(WARN_SECONDS, patience)
        return is_due and since != self.warned_of


class RankWatch:
    """Watches the ranks of one group, from one of them."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        connect: Callable[[], Any],
        abort: Callable[[], None],
        *,
        prefix: str,
        can_interrupt: bool,
        mark: torch.cuda.Event | None = None,
        processes: Sequence[Process] = (),
        peers: Peers | None = None,
        ending: Ending | None = None,
    ) -> None:
        """Starts the watching thread; the calling thread is the one that trains.

        Args:
            connect: opens a connection of the watch's own to the store that the ranks share.
            abort: ends the collectives that are under way, if they can be ended.
            prefix: prefix of keys in the store; the same on these ranks, another for every engine.
            can_interrupt: whether collectives can be ended.
            mark: event to record behind collectives on the current stream; None without a device.
            processes: those of all ranks; (): they know of each other through the store only.
            peers: connections to ranks of other hosts, closed by the watch; None: one host.
            ending: ends this process when the job is lost; None: the process goes on.
        """
        self._rank = rank
        self._abort = abort
        self._can_interrupt = can_interrupt
        self._ending = ending
        self._training_thread = threading.get_ident()
        self._process = os.getpid()
        self._lane = DaemonExecutor("hytrain-lane")
        self._history = History()
        self._waits = Waits(mark)
        self._told = False
        self._broken: tuple[Exception, float] | None = None
        """A collective's failure whose reason is waited for, and since when."""
        self._explained: Exception | None = None
        self._failure: RankFailedError | OutOfStepError | None = None
        self._failed = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        # Its lock guards the end, too: a watch that is closed must not fail.
        self._outbox = Outbox(rank, world_size, self._is_cut_off)
        # What follows is used by the watching thread alone.
        self._presence = Presence(rank, processes, peers)
        self._words = Words(rank)
        self._is_behind = False
        self._news_began = -math.inf
        status = StatusStore(rank, world_size, connect, prefix)
        self._store = StoreLooks(status, by_network=peers is not None, ended=self._wake.set)
        self._requests = _Requests()
        self._thread = threading.Thread(target=self._run, name="hytrain-watch", daemon=True)
        self._thread.start()
        process_exit.follow(self)

    # -- the training thread -------------------------------------------------------------------

    def issue(self, what: str) -> None:
        """Notes that a collective is about to be issued; ``what`` is the same on all ranks.

        Raises:
            RankFailedError, OutOfStepError: it will not end.
        """
        self.check()
        self._history.add(what)
        if self._told:
            self._told = False
            self._say("back", "", final=False)

    def check(self) -> None:
        """Raises the failure that was found, if any; costs nothing otherwise.

        Raises:
            RankFailedError: another rank has failed.
            OutOfStepError: the ranks' collectives cannot meet any more.
        """
        if self._failure is not None:
            self._hold_ending()
            raise self._failure

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Declares that the host waits for other ranks while the block runs.

        Raises:
            RankFailedError, OutOfStepError: the wait is in vain.
        """
        try:
            with self._waits.on_host():
                yield
                # A device whose collectives were aborted goes on with garbage.
                self.check()
        except Exception as error:
            # An error from what a device with aborted collectives has computed is only a symptom.
            if self._failure is not None and error is not self._failure:
                self._hold_ending()
                raise self._failure from error
            raise

    def run(self, collective: Callable[[], object]) -> None:
        """Runs a collective (NCCL: issues it) until it ends, or is known never to end.

        Raises:
            RankFailedError, OutOfStepError: it will not end.
            RuntimeError: it has failed, and no rank has given a reason.
        """
        try:
            if self._can_interrupt:
                collective()
                self._waits.queued()
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
            failure = self.explain(error)
            if failure is None:
                raise
            raise failure from error

    def explain(self, error: Exception) -> RankFailedError | OutOfStepError | None:
        """Returns the failure behind a failed collective; None if no rank has said anything.

        Waits for it if another rank must be the cause.
        """
        is_new = error is not self._explained and not self._closed.is_set()
        if self._failure is None and is_new and is_connection_error(error):
            self._explained, self._broken = error, (error, time.monotonic())
            self._wake.set()
            self._failed.wait(EXPLAIN_SECONDS + 6 * POLL_SECONDS)  # in which _decide() gives up
            self._broken = None
        if self._failure is not None:
            self._hold_ending()
        return self._failure

    def tell(self, error: BaseException, *, final: bool) -> None:
        """Tells the other ranks of a failure here.

        ``error``: the failure. ``final``: the process ends; otherwise others wait for a while, as
        this rank may come back.
        """
        # What happens after another rank's failure is not a cause.
        if self._is_over() or isinstance(error, (RankFailedError, OutOfStepError)):
            return
        self._told = True
        if final:
            self._hold_ending()
        self._say("error", f"{type(error).__name__}: {error}"[:_MOST_TEXT], final=final)

    def leave(self, text: str = "") -> None:
        """Tells that this rank issues no more collectives: a failure only for ranks that wait.

        ``text``: why, if not because the engine was closed.
        """
        if not self._is_over():
            self._say("left", text, final=True)

    def _is_over(self) -> bool:
        # A forked child's failures are not this rank's.
        is_forked = os.getpid() != self._process
        has_ended = self._outbox.has_ended or self._closed.is_set()
        return is_forked or has_ended or self._failure is not None

    def flush(self) -> None:
        """See :meth:`Outbox.flush`."""
        self._outbox.flush(self._wake.set)

    def _is_cut_off(self) -> bool:
        return self._store.lost_since is not None or not self._thread.is_alive()

    def close(self) -> None:
        """Ends the threads. May be called twice."""
        if self._closed.is_set():
            return
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            # It is on its way out, through clean-up code, and may never reach the excepthook.
            self.explain(error)
            self.tell(error, final=True)
        self.leave()
        self.flush()
        with self._outbox.changed:
            self._closed.set()
        self._wake.set()
        process_exit.forget(self)
        self._lane.close()
        # Without the joins a thread could be in the store's C++ when the interpreter ends, which
        # aborts the process. With a limit: the store may be gone, and after a failure the thread
        # goes on to see this process out.
        if self._failure is None:
            self._thread.join(_CLOSING_SECONDS)
        self._store.close(_CLOSING_SECONDS)

    def _hold_ending(self) -> None:
        """Tells the ending that an exception is on its way, so that it need not raise one."""
        if self._ending is not None:
            self._ending.told()

    def _say(self, kind: Kind, text: str, *, final: bool, about: int | None = None) -> None:
        self._outbox.say(Word(self._rank, kind, text, final, about, self._history.issued))
        self._wake.set()

    # -- the watching thread -------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait((0.1 if self._outbox.is_flushing else 1.0) * POLL_SECONDS)
            self._wake.clear()
            try:
                self._turn()
            except Exception:
                logger.exception("the watch of the other ranks goes on after an error of its own")
        self._presence.close()
        # Until the interpreter ends, or the process is ended because it waits for other ranks.
        while self._failure is not None and self._ending is not None:
            self._ending.turn()
            time.sleep(POLL_SECONDS)

    def _turn(self) -> None:
        faults.point("watch: a turn")
        now = time.monotonic()
        self._presence.turn(now)
        if self._store.end(now):
            self._outbox.used_store()
        if not (self._store.is_looking or self._closed.is_set() or now < self._next_look()):
            self._look(now)
        if self._failure is None:
            self._decide(now)
        elif self._ending is not None:
            self._ending.turn()

    def _look(self, now: float) -> None:
        """Begins a look at the store."""
        is_soon = now - self._requests.asked_at < ASK_SECONDS
        since = None if is_soon else self._waits.late_since(now)
        warns = since is not None and self._requests.ask(now, since, self._waits.patience)
        words = self._outbox.words
        for word in words:
            self._words.hear(word)

        def look(status: StatusStore) -> News:
            faults.point("watch: a look")
            return status.look(
                words,
                self._history,
                lambda: place_of(self._training_thread),
                ask=since is not None,
                want_standings=warns,
                hears=self._failure is None,
            )

        self._store.begin(now, look, lambda now, news: self._take(now, news, len(words), since))

    def _next_look(self) -> float:
        if self._store.lost_since is not None and self._words.has_anyone_left():
            # The holder has ended in order, and torch warns of every use.
            return math.inf
        is_unread = any(self._news_began < since for since in self._presence.gone_since.values())
        has_said = self._outbox.is_flushing or self._outbox.words
        is_urgent = has_said or is_unread or self._is_behind
        return self._store.began + (0.1 if is_urgent else 1.0) * POLL_SECONDS

    def _take(self, now: float, news: News, said: int, since: float | None) -> None:
        self._is_behind = news.is_behind
        if not news.is_behind:
            self._news_began = news.began
        for word in news.words:
            self._words.hear(word)
        # A rank that was killed will not acknowledge.
        killed = self._words.silent(self._presence.gone_since)
        self._outbox.sent(said, news.know_end + len(killed))
        self._decide(now)  # the cause that a rank gives comes before its consequences
        mine = dict(self._history.recent())
        for rank, other in news.histories.items():
            for number, there in other:
                if self._failure is None and (here := mine.get(number, there)) != there:
                    text = f"the ranks are out of step: collective number {number + 1} is {here} on"
                    text += f" rank {self._rank} and {there} on rank {rank}. {SAME_NUMBER}"
                    self._fail(OutOfStepError(text), "apart")
        if news.standings and since is not None and self._failure is None:
            self._warn(now, since, news.standings)

    # -- judgement -----------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        """Fails this rank if another one has failed."""
        broken, lost_since = self._broken, self._store.lost_since
        # A rank that has left will not come to a collective that has broken off.
        is_late = broken is not None or self._waits.late_since(now) is not None
        name = self._presence.name
        gone = {r: name(r) for r in self._presence.gone_since if self._is_silent(r, now)}
        if is_late and self._presence.has_other_hosts:
            for rank, seconds in self._presence.unreachable().items():
                if seconds > UNREACHABLE_SECONDS:
                    gone[rank] = f"{name(rank)}, has not answered for {seconds:.0f} s"
            silent = self._store.silent(now)
            if silent > STORE_UNREACHABLE_SECONDS:
                self._lose_store(f"has not answered for {silent:.0f} s")
        cause = self._words.cause(gone, number=self._history.last[0] if is_late else None)
        if cause is not None:
            about, failure = cause
            self._fail(failure, "apart" if about is None else "found", about)
        elif broken is not None and now - broken[1] > EXPLAIN_SECONDS:
            self._lose_connection(str(broken[0]))
        elif now - (lost_since or now) > STORE_SECONDS and not self._words.has_anyone_left():
            # Else the holder has ended in order.
            self._lose_store("cannot be reached any more")

    def _is_silent(self, rank: int, now: float) -> bool:
        """Whether the last words of a rank that is gone would have come by now."""
        since = self._presence.gone_since[rank]
        if self._store.lost_since is None:
            is_missing = now - since > STORE_SECONDS and not self._is_behind
        else:  # The holder has failed: others end because of it, and cannot say so.
            is_missing = rank == 0 or self._words.has_anyone_left()
        return now - since > CONFIRM_SECONDS and (self._news_began > since or is_missing)

    def _lose_store(self, how: str) -> None:
        is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "the launcher of rank 0" if is_launchers else "rank 0"
        text = f"{holder} was killed or has crashed, or its host is gone: the process group's store"
        text += f", which it holds, {how}. Start the job again from a checkpoint"
        self._fail(RankFailedError(text), "error")

    def _lose_connection(self, text: str) -> None:
        """Fails this rank if a connection broke off to a rank whose watch cannot say why."""
        ranks, has_unheard = self._presence.suspects(text)
        if not ranks:
            return
        names = " or ".join(f"rank {rank} ({self._presence.name(rank)})" for rank in ranks)
        why = "and its host does not answer: it was shut down or restarted, or the network is down"
        if has_unheard:
            why = (
                "and its watch has not answered since the start: a firewall forbids the ranks' "
                "watches to connect, so that it cannot be told whether that rank has failed or "
                "was killed, or its host is gone"
            )
        failure = f"the connection to {names} was lost, {why}. See its log. Start the job again "
        failure += f"from a checkpoint (torch says: {text})"
        about = ranks[0] if len(ranks) == 1 else None
        self._fail(RankFailedError(failure), "error" if about is None else "found", about)

    def _fail(
        self, failure: RankFailedError | OutOfStepError, kind: Kind, about: int | None = None
    ) -> None:
        with self._outbox.changed:
            if self._failure is not None or self._closed.is_set():
                return
            # Before any thread is woken: it looks for the failure at once. And together with the
            # word: that thread may go on to close(), which waits for what was said.
            self._failure = failure
            self._say(kind, str(failure), final=True, about=about)
        logger.error("%s", failure)
        if self._ending is not None:
            self._ending.require(failure)
        if self._can_interrupt:
            # In a thread that is joined with a limit: it may take long, or forever.
            aborting = threading.Thread(target=self._end_collectives, daemon=True)
            aborting.start()
            aborting.join(POLL_SECONDS)
        self._failed.set()

    def _end_collectives(self) -> None:
        with suppress(Exception):
            self._abort()

    def _warn(self, now: float, since: float, standings: dict[int, tuple[int, str]]) -> None:
        """Logs, once per wait, which ranks have not come to where this one is."""
        number, what = self._history.last
        behind = [rank for rank, (issued, _) in standings.items() if issued <= number]
        if not behind:
            return
        self._requests.warned_of = since
        here = f"rank {self._rank} has waited for {now - since:.0f} s at its collective number "
        here += f"{number + 1}, {what}; not there yet: ranks {behind}."
        lost = self._presence.unreachable()
        if silent := [rank for rank in behind if rank in lost]:
            logger.warning(
                "%s Of %s, and its host does not answer. Is a host, or the network between, down? "
                "The job ends when it has not answered for a minute",
                here,
                "; ".join(
                    f"rank {rank} ({self._presence.name(rank)}) nothing has been heard for "
                    f"{lost[rank]:.0f} s"
                    for rank in silent
                ),
            )
            return
        logger.warning(
            "%s They may only be slow. But if this rank alone uses the model's weights, as with "
            "'if rank == 0: evaluate(model)', they never come: then call engine.synchronize() on "
            "all ranks before.%s",
            here,
            "".join(f" Rank {r} stands at {standings[r][1]}." for r in behind if standings[r][1]),
        )
