"""Ranks that watch each other, here as objects around one store in memory."""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist

from hytrain.comm import failure_watch as watch
from hytrain.comm import process_exit, store_looks, waits
from hytrain.comm.failure_messages import Word
from hytrain.comm.failure_watch import RankWatch
from hytrain.comm.rank_status import History, StatusStore
from hytrain.errors import OutOfStepError, RankFailedError
from hytrain.testing import faults

pytestmark = pytest.mark.timeout(120)

PATIENCE = 0.2
LONGEST_WAIT = 30.0
"""Seconds for what must be found, on a busy machine."""
QUIET = 3 * PATIENCE
"""How long nothing may be found where there is nothing."""
GLOO = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1"


class Store:
    """A store that can break, or not answer."""

    def __init__(self) -> None:
        self.store: Any = dist.HashStore()
        self.broken = 0
        self.lock = threading.Lock()
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        self.answers.wait()
        with self.lock:  # of all ranks' threads
            if self.broken:
                self.broken -= 1
                raise RuntimeError("connection reset by peer")
        return getattr(self.store, name)


class Queue:
    """A device's queue, seen at one mark: what was issued ends when the test says so."""

    def __init__(self) -> None:
        self.marks = 0
        self.is_done = True
        self.error: Exception | None = None

    def record(self) -> None:
        self.marks += 1

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_done


class Job:
    """Some ranks."""

    def __init__(self, world_size: int = 3) -> None:
        self.store = Store()
        self.aborted: list[int] = []
        self.queue = Queue()
        self.ranks = [
            RankWatch(
                rank,
                world_size,
                connect=lambda: self.store,
                abort=lambda rank=rank: self.aborted.append(rank),
                prefix="a job",
                can_interrupt=rank != 2,  # the last one's backend cannot be
                mark=self.queue if rank == 0 else None,  # type: ignore[arg-type]
            )
            for rank in range(world_size)
        ]

    def wait_for(self, rank: int) -> Exception | None:
        """What the rank finds; a busy machine may take its time."""
        self.ranks[rank]._failed.wait(LONGEST_WAIT)
        return self.ranks[rank]._failure

    def finds_nothing(self, rank: int) -> bool:
        """Whether the rank goes on."""
        return not self.ranks[rank]._failed.wait(QUIET) and self.ranks[rank]._failure is None

    def issue(self, *counts: int) -> None:
        """The ranks have come so far."""
        for rank, count in zip(self.ranks, counts, strict=True):
            for number in range(count):
                rank.issue(f"the gather of {number}")

    def is_known(self, rank: int, kind: str) -> bool:
        """Whether all ranks have heard a rank's last word, of that kind."""
        words = [watch._words._last.get(rank) for watch in self.ranks]
        return all(word is not None and word.kind == kind for word in words)


def within(condition: Callable[[], bool]) -> bool:
    """Whether it comes true, on a busy machine too."""
    deadline = time.monotonic() + LONGEST_WAIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(watch, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(waits, "PATIENCE_SECONDS", PATIENCE)
    monkeypatch.setattr(watch, "STORE_SECONDS", 0.5)
    monkeypatch.setattr(watch, "_CLOSING_SECONDS", LONGEST_WAIT)  # of threads that do end
    job = Job()
    yield job
    job.store.answers.set()
    for rank in job.ranks[::-1]:  # the first one waits for the others
        rank.close()
    for rank in job.ranks:
        rank._thread.join(LONGEST_WAIT)
        assert not rank._thread.is_alive()


def test_a_failure_that_ends_a_process_reaches_all(job: Job) -> None:
    job.ranks[1].tell(ValueError("no such file"), final=True)
    job.ranks[1].tell(ValueError("the end of the process"), final=False)
    for rank in (0, 2):
        found = job.wait_for(rank)
        assert isinstance(found, RankFailedError)
        assert "rank 1 has failed" in str(found)
        assert "ValueError: no such file" in str(found)
        with pytest.raises(RankFailedError):
            job.ranks[rank].issue("anything")
        job.ranks[rank].tell(found, final=True)  # no news of its own
    assert job.finds_nothing(1)
    assert job.aborted == [0]


@pytest.mark.parametrize("seed", range(4))
def test_the_first_of_several_failures_is_found_in_any_order_of_threads(
    job: Job, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(faults, "_random", random.Random(seed))
    monkeypatch.setenv(faults.DELAYS_VARIABLE, f"{seed}:50000")
    job.ranks[1].tell(ValueError("the cause"), final=True)
    with pytest.raises(RankFailedError, match="the cause"), job.ranks[2].waiting():
        assert job.ranks[2]._failed.wait(LONGEST_WAIT)
    job.ranks[2].tell(ValueError("what follows of it"), final=True)
    assert "rank 1 has failed" in str(job.wait_for(0))
    job.ranks[0].flush()
    assert job.ranks[1]._failure is None


def test_a_failure_that_may_be_mended_counts_for_those_who_wait(job: Job) -> None:
    job.ranks[1].tell(ValueError("out of luck"), final=False)
    assert job.finds_nothing(2)  # it computes: it can wait
    with pytest.raises(RankFailedError, match="rank 1 has failed"), job.ranks[0].waiting():
        assert job.ranks[0]._failed.wait(LONGEST_WAIT)
    # Who has waited in vain does not come back; that is nobody's fault but rank 1's.
    assert "rank 1 has failed" in str(job.wait_for(2))
    assert job.ranks[1]._failure is None


def test_a_rank_that_goes_on_is_forgiven(job: Job) -> None:
    job.ranks[1].tell(ValueError("once"), final=False)
    job.ranks[1].issue("reduce")
    assert within(lambda: job.is_known(1, "back"))
    with job.ranks[0].waiting():
        time.sleep(QUIET)


def test_ranks_that_have_all_failed_wait_for_nobody(job: Job) -> None:
    for rank in job.ranks:
        rank.tell(ValueError("all"), final=False)
    assert within(lambda: all(job.is_known(rank, "error") for rank in range(3)))
    with job.ranks[0].waiting():
        time.sleep(QUIET)


def test_different_collectives_at_one_number_are_found(job: Job) -> None:
    job.issue(3000, 3000, 3000)  # more than is remembered
    for rank in (0, 1):
        job.ranks[rank].issue("reduce 1")
    job.ranks[2].issue("norm")
    job.ranks[2].issue("gather")
    with (
        pytest.raises(OutOfStepError, match="collective number 3001 is reduce 1 on rank 0 and"),
        job.ranks[0].waiting(),
    ):
        assert job.ranks[0]._failed.wait(LONGEST_WAIT)
    for rank in (1, 2):
        assert isinstance(job.wait_for(rank), OutOfStepError)


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_rank_that_is_alone_says_so_and_goes_on(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.5)
    job.issue(10, 9, 10)
    job.queue.is_done = False
    with caplog.at_level(logging.WARNING, "hytrain"):
        if place == "device":
            job.ranks[0].run(lambda: None)
        with job.ranks[0].waiting() if place == "host" else nullcontext():
            assert within(lambda: bool(caplog.records))
            time.sleep(QUIET)  # it says so once
    (record,) = caplog.records
    text = record.getMessage()
    assert "rank 0 has waited for" in text
    assert "collective number 10, the gather of 9; not there yet: ranks [1]. They may" in text
    assert "engine.synchronize()" in text
    assert f"Rank 1 stands at {__file__}:" in text
    assert job.ranks[0]._failure is None


def test_a_rank_that_waits_with_all_others_says_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.3)
    job.issue(1, 1, 1)
    with caplog.at_level(logging.WARNING, "hytrain"), job.ranks[0].waiting():
        time.sleep(QUIET)
    assert not caplog.records


class _Peers:
    """What connections tell, where other hosts are."""

    def __init__(
        self,
        unheard: set[int] = frozenset(),  # type: ignore[assignment]
        lost: dict[int, float] = {},  # noqa: B006
        refused: tuple[int, ...] = (),
    ) -> None:
        self._unheard, self._lost, self._refused = unheard, lost, refused

    def unheard(self) -> set[int]:
        return self._unheard

    def ranks_at(self, text: str) -> set[int]:
        return {1} if "[10.0.0.2]" in text else set()

    def unreachable(self) -> dict[int, float]:
        return self._lost

    def refused(self) -> list[int]:
        return list(self._refused)

    def turn(self) -> None: ...

    close = turn


def on_other_hosts(monkeypatch: pytest.MonkeyPatch, rank: RankWatch, peers: _Peers) -> None:
    """The rank has connections to others, and the store may be there, too."""
    monkeypatch.setattr(rank._presence, "_peers", peers)
    monkeypatch.setattr(rank._store, "_by_network", True)


def test_a_host_that_does_not_answer_is_said_and_given_up(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.5)
    lost = {1: 20.0}
    on_other_hosts(monkeypatch, job.ranks[0], _Peers(lost=lost))
    job.issue(10, 9, 10)
    with caplog.at_level(logging.WARNING, "hytrain"), job.ranks[0].waiting():
        assert within(lambda: bool(caplog.records))
    text = caplog.records[0].getMessage()
    assert "not there yet: ranks [1]. Of rank 1 (its process) nothing has been heard for 20" in text
    assert "Is a host, or the network" in text
    assert "evaluate" not in text
    lost[1] = 61.0
    assert job.finds_nothing(0), "it does not wait"
    with pytest.raises(RankFailedError, match="has not answered for 61 s"), job.ranks[0].waiting():
        assert job.ranks[0]._failed.wait(LONGEST_WAIT)


def test_a_store_on_a_host_that_does_not_answer_is_given_up(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STORE_UNREACHABLE_SECONDS", 0.5)
    job.store.answers.clear()
    time.sleep(QUIET)
    with job.ranks[0].waiting():
        time.sleep(QUIET)  # on one host it is a process that is stopped
    on_other_hosts(monkeypatch, job.ranks[1], _Peers())
    with (
        pytest.raises(RankFailedError, match=r"rank 0 was killed .* has not answered"),
        job.ranks[1].waiting(),
    ):
        assert job.ranks[1]._failed.wait(LONGEST_WAIT)


def test_a_store_that_does_not_answer_is_asked_again_on_a_connection_of_its_own(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent while the network was down may be sent again only long after it is back."""
    monkeypatch.setattr(store_looks, "RECONNECT_SECONDS", 0.3)
    job.store.answers.clear()
    time.sleep(QUIET)  # looks have begun
    other = Store()
    other.store = job.store.store
    fails = [OSError("no route to host")]

    def connect() -> Store:
        if fails:
            raise fails.pop()
        return other

    rank = job.ranks[1]
    store = rank._store
    lane = store._lane
    monkeypatch.setattr(store._status, "_connect", connect)
    on_other_hosts(monkeypatch, rank, _Peers())
    assert within(lambda: not fails and store._unanswered_since is None)
    assert store.lost_since is None
    assert job.finds_nothing(1)
    abandoned = lane._thread
    assert lane is not store._lane
    assert abandoned is not None
    job.store.answers.set()
    assert within(lambda: not abandoned.is_alive()), "a thread a silence would stay for ever"


def test_a_connection_lost_to_a_rank_whose_host_does_not_answer(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError(GLOO)

    monkeypatch.setattr(watch, "EXPLAIN_SECONDS", 0.2)
    on_other_hosts(monkeypatch, job.ranks[2], _Peers(lost={1: 3.0}))
    with pytest.raises(RankFailedError, match=r"connection to rank 1 .*host does not answer"):
        job.ranks[2].run(broken)
    assert "the connection to rank 1 (its process) was lost" in str(job.wait_for(0))


def test_a_connection_lost_to_a_rank_whose_watch_is_not_heard(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError(GLOO)

    monkeypatch.setattr(watch, "EXPLAIN_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match="Connection closed by peer") as unexplained:
        job.ranks[2].run(broken)
    assert not isinstance(unexplained.value, RankFailedError), "on one host"
    on_other_hosts(monkeypatch, job.ranks[2], _Peers(unheard={1}))
    with pytest.raises(RankFailedError, match=r"connection to rank 1 .*has not answered") as raised:
        job.ranks[2].run(broken)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert "the connection to rank 1 (its process) was lost" in str(job.wait_for(0))


def test_waits_that_are_usual_alarm_nobody(job: Job) -> None:
    rank = job.ranks[0]
    rank._waits._usual.append(0.6)  # as long as a step's backward takes
    job.ranks[1].tell(ValueError("injected"), final=False)
    begin = time.monotonic()
    with pytest.raises(RankFailedError), rank.waiting():
        assert rank._failed.wait(LONGEST_WAIT)
    assert time.monotonic() - begin > 1.7
    assert len(rank._waits._usual) == 1, "a wait in vain is no usual one"


def test_a_wait_of_the_device_alone_is_one(job: Job) -> None:
    """The host has gone on to something of its own, such as a loss's value."""
    job.queue.is_done = False
    job.ranks[0].run(lambda: None)
    job.ranks[1].tell(ValueError("out of luck"), final=False)
    assert "out of luck" in str(job.wait_for(0))
    assert job.queue.marks == 1
    assert job.aborted == [0]


@pytest.mark.parametrize("how", ["done", "broken", "not issued"])
def test_a_device_that_waits_for_nobody_gives_up_nothing(job: Job, how: str) -> None:
    job.queue.is_done = how == "done"
    job.queue.error = RuntimeError("device-side assert") if how == "broken" else None
    if how != "not issued":
        job.ranks[0].run(lambda: None)
    job.ranks[1].tell(ValueError("may be mended"), final=False)
    assert job.finds_nothing(0)


# -- the store --------------------------------------------------------------------------------


def test_a_lost_connection_is_made_again_and_no_word_is_lost(job: Job) -> None:
    job.store.broken = 20
    job.ranks[1].tell(ValueError("said meanwhile"), final=True)
    assert "said meanwhile" in str(job.wait_for(0))


def test_a_store_that_is_gone_is_a_failure(job: Job) -> None:
    job.store.broken = 10**9
    found = job.wait_for(1)
    assert isinstance(found, RankFailedError)
    assert "rank 0 was killed or has crashed" in str(found)
    assert "store, which it holds, cannot be reached" in str(found)


@pytest.mark.parametrize("has_left", [False, True], ids=["killed", "left in order"])
def test_a_rank_that_ends_after_its_store_is_the_cause_only_where_the_holder_left_in_order(
    job: Job, monkeypatch: pytest.MonkeyPatch, has_left: bool
) -> None:
    """Rank 1 hears of rank 2's end, and has no connection that tells of rank 0's."""
    if has_left:
        job.ranks[0].leave()
        assert within(lambda: job.is_known(0, "left"))
    with job.store.lock:  # the end and the loss are found in any order
        on_other_hosts(monkeypatch, job.ranks[1], _Peers(refused=(2,)))
        job.store.broken = 10**9
    found = str(job.wait_for(1))
    assert f"rank {2 if has_left else 0} was killed or has crashed" in found
    assert "rank 2" in found or "store, which it holds, cannot be reached" in found


def test_who_holds_the_store_stays_until_its_end_is_known(job: Job) -> None:
    for rank in job.ranks[1:]:
        rank._closed.set()  # their threads read no more
        rank._wake.set()
        rank._thread.join(LONGEST_WAIT)
    first = job.ranks[0]
    first.tell(ValueError("the end"), final=True)
    ended = threading.Thread(target=first.flush)
    ended.start()
    ended.join(QUIET)
    assert ended.is_alive()
    for rank in (1, 2):
        other = StatusStore(rank, 3, lambda: job.store, "a job")
        news = other.look((), History(), lambda: "")
        assert [word.text for word in news.words] == ["ValueError: the end"]
    ended.join(LONGEST_WAIT)
    assert not ended.is_alive()


def test_a_word_that_was_announced_and_never_written_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    ranks = [StatusStore(rank, 2, lambda: store, "a job") for rank in range(2)]

    def is_killed(name: str) -> None:
        if name == "watch: a word":
            raise KeyboardInterrupt

    said = Word(0, "error", "ValueError", final=True)
    with monkeypatch.context() as patch:
        patch.setattr(faults, "point", is_killed)
        with pytest.raises(KeyboardInterrupt):
            ranks[0].look([said], History(), lambda: "")
    ranks[0].look([said], History(), lambda: "")
    heard: list[Word] = []
    assert within(lambda: heard.extend(ranks[1].look((), History(), str).words) or bool(heard))
    assert heard == [said]


@pytest.mark.parametrize("fails_at", ["over", "history", "standing", "warners"])
def test_a_look_that_fails_in_its_middle_is_made_again_with_all_that_it_had_heard(
    monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    store = dist.HashStore()
    ranks = [StatusStore(rank, 2, lambda: store, "a job") for rank in range(2)]
    last = Word(1, "error", "ValueError", final=True)
    assert ranks[1].look([last], History(), str).know_end == 1
    call = StatusStore._find if fails_at in ("history", "standing") else StatusStore._add

    def breaks(self: StatusStore, what: str, number: int) -> Any:
        if what.startswith(fails_at):
            raise RuntimeError("connection reset by peer")
        return call(self, what, number)

    left = Word(0, "left", "", final=True)
    with monkeypatch.context() as patch:
        patch.setattr(StatusStore, call.__name__, breaks)
        with pytest.raises(RuntimeError, match="connection reset"):
            ranks[0].look([left], History(), str, ask=True, want_standings=True)
    news = ranks[0].again().look([left], History(), str)
    assert last in news.words
    assert news.know_end == 2, "each rank counts itself once"


# -- the end ----------------------------------------------------------------------------------


def test_reports_what_ends_the_process(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every watch of this process is one of another rank here; rank 1's tells.
    for rank in (0, 2):
        process_exit.forget(job.ranks[rank])
    sys.excepthook(KeyError, KeyError("the script's"), None)
    assert "the script's" in capsys.readouterr().err
    assert "rank 1 has failed" in str(job.wait_for(2))


def test_reports_an_exception_that_passes_through_close(job: Job) -> None:
    def fails() -> None:
        try:
            raise OSError("disk")
        finally:
            job.ranks[1].close()

    with pytest.raises(OSError, match="disk"):
        fails()
    assert "OSError: disk" in str(job.wait_for(2))


def test_the_end_of_the_data_is_no_failure(job: Job) -> None:
    try:
        next(iter(()))
    except StopIteration:
        job.ranks[1].close()
    assert within(lambda: job.ranks[0]._words.has_anyone_left())
    assert job.finds_nothing(0)


def test_a_forked_childs_failure_is_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(watch.os, "getpid", lambda: -1)
        job.ranks[1].tell(ValueError("in a data loader"), final=True)
    assert not job.ranks[1]._outbox.words
    assert job.finds_nothing(0)


def test_a_watch_that_was_closed_meanwhile_does_not_fail(job: Job) -> None:
    job.ranks[1].close()
    job.ranks[1]._fail(OutOfStepError("the other ranks have ended"), "apart")
    assert job.ranks[1]._failure is None
    assert not job.aborted


# -- collectives that cannot be interrupted ---------------------------------------------------


def test_a_collective_that_does_not_end_is_left(job: Job) -> None:
    release = threading.Event()
    try:
        job.ranks[0].tell(ValueError("gone"), final=True)
        with pytest.raises(RankFailedError, match="rank 0 has failed"):
            job.ranks[2].run(lambda: release.wait(30))
    finally:
        release.set()


def test_a_failed_collective_is_explained_where_somebody_knows(job: Job) -> None:
    def broken() -> Any:
        raise RuntimeError(GLOO)

    job.ranks[1].tell(ValueError("the cause"), final=False)
    with pytest.raises(RankFailedError, match="the cause") as raised:
        job.ranks[2].run(broken)
    assert isinstance(raised.value.__cause__, RuntimeError)
