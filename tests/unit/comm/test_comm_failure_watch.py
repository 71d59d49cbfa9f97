"""Ranks that watch each other, here as objects around one store in memory."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from hytrain.comm import crash_report
from hytrain.comm import failure_watch as watch
from hytrain.comm import rank_status as bulletin
from hytrain.comm.daemon_executor import DaemonExecutor
from hytrain.comm.failure_messages import Word
from hytrain.comm.failure_watch import RankWatch
from hytrain.errors import OutOfStepError, RankFailedError

pytestmark = pytest.mark.timeout(120)

PATIENCE = 0.2
LONGEST_WAIT = 30.0
"""Seconds for what must be found, on a busy machine."""
QUIET = 3 * PATIENCE
"""How long nothing may be found where there is nothing."""


class MemoryStore:
    """A store that can break."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.broken = 0
        self.lock = threading.Lock()

    def _use(self) -> None:
        with self.lock:  # of all ranks' threads
            if self.broken:
                self.broken -= 1
                raise RuntimeError("connection reset by peer")

    def set(self, key: str, value: str, /) -> None:
        self._use()
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        self._use()
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        self._use()
        return all(key in self.values for key in keys)

    def delete_key(self, key: str, /) -> bool:
        self._use()
        return self.values.pop(key, None) is not None


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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int = 3) -> None:
        self.store = MemoryStore()
        self.aborted: list[int] = []
        number = itertools.repeat(7)  # one engine: the same number on all ranks
        monkeypatch.setattr(bulletin, "_numbers", number)
        self.queue = Queue()
        self.ranks = [
            RankWatch(
                rank,
                world_size,
                connect=lambda: self.store,
                abort=lambda rank=rank: self.aborted.append(rank),
                group="0",
                can_interrupt=rank != 2,  # the last one's backend cannot be
                mark=self.queue if rank == 0 else None,
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

    def all_publish(self) -> None:
        """What the ranks have issued is on the store, before anybody judges by it."""
        status = self.ranks[0]._status
        last = [rank._history.last[0] for rank in self.ranks]

        def published() -> list[int]:
            found = status.histories()
            return [h["first"] + len(h["recent"]) - 1 for _, h in sorted(found.items())]

        assert within(lambda: (status.ask(), published())[1] == last)

    def is_known(self, rank: int, kind: str) -> bool:
        """Whether the rank's last word on the store is of a kind."""
        words = [word for word in self.ranks[0]._status.words() if word.rank == rank]
        return bool(words) and words[-1].kind == kind


def within(condition: Callable[[], bool]) -> bool:
    """Whether it comes true, on a busy machine too."""
    deadline = time.monotonic() + LONGEST_WAIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(watch, "PATIENCE_SECONDS", PATIENCE)
    for limit in ("_OVER_SECONDS", "_CLOSING_SECONDS"):  # for threads that end, but not at once
        monkeypatch.setattr(watch, limit, LONGEST_WAIT)
    job = Job(monkeypatch)
    yield job
    for rank in job.ranks:
        rank.close()
        assert not rank._thread.is_alive()


def test_a_failure_that_ends_a_process_reaches_all(job: Job) -> None:
    job.ranks[1].tell(ValueError("no such file"), final=True)
    for rank in (0, 2):
        found = job.wait_for(rank)
        assert isinstance(found, RankFailedError)
        assert "rank 1 has failed" in str(found)
        assert "ValueError: no such file" in str(found)
        with pytest.raises(RankFailedError):
            job.ranks[rank].issue("anything")
    assert job.finds_nothing(1)
    assert job.aborted == [0]


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
    for rank in job.ranks:
        for number in range(3000):  # more than is remembered
            rank.issue(f"reduce {number % 7}")
    for rank in (0, 1):
        job.ranks[rank].issue("reduce 1")
    job.ranks[2].issue("norm")
    job.ranks[2].issue("gather")
    with (
        pytest.raises(OutOfStepError, match="collective number 3001 is reduce 1 on rank 0 and"),
        job.ranks[0].waiting(),
    ):
        assert job.ranks[0]._failed.wait(LONGEST_WAIT)
    assert isinstance(job.wait_for(2), OutOfStepError)


def test_ranks_that_are_only_late_are_in_step(job: Job) -> None:
    for rank, count in zip(job.ranks, (10, 7, 9), strict=True):
        for number in range(count):
            rank.issue(f"reduce {number}")
    with job.ranks[0].waiting():
        time.sleep(QUIET)
    is_over = within(lambda: "hytrain/watch/0/7/trouble" not in job.store.values)
    assert is_over, "nobody asks any more"


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
    time.sleep(QUIET)
    assert job.ranks[0]._failure is None


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_rank_that_is_alone_says_so(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.5)
    for rank, count in zip(job.ranks, (10, 9, 10), strict=True):
        for number in range(count):
            rank.issue(f"the gather of {number}")
    job.all_publish()
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
    assert job.ranks[0]._failure is None


class _Monitor:
    """What a process monitor says, where other hosts are."""

    def __init__(self, unheard: dict[int, str], lost: dict[int, str]) -> None:
        self._unheard, self._lost = unheard, lost

    def unheard(self, text: str) -> dict[int, str]:
        return {rank: name for rank, name in self._unheard.items() if "pair.cc" in text}

    def lost_hosts(self) -> dict[int, str]:
        return self._lost

    def gone(self) -> dict[int, str]:
        return {}

    unreachable = gone

    def hears_all(self) -> bool:
        return False

    def say(self, word: Word) -> None:
        del word

    def close(self) -> None:
        pass


def test_a_host_that_does_not_answer_is_said_instead_of_advice(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.5)
    name = "rank 1 (process 4 on host b) nothing has been heard for 20 s"
    monkeypatch.setattr(job.ranks[0], "_monitor", _Monitor({}, {1: name}))
    for rank, count in zip(job.ranks, (10, 9, 10), strict=True):
        for number in range(count):
            rank.issue(f"the gather of {number}")
    job.all_publish()
    with caplog.at_level(logging.WARNING, "hytrain"), job.ranks[0].waiting():
        assert within(lambda: bool(caplog.records))
    text = caplog.records[0].getMessage()
    assert f"not there yet: ranks [1]. Of {name}. Is a host, or the network" in text
    assert "evaluate" not in text


def test_a_connection_lost_to_a_rank_whose_watch_is_not_heard(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]")

    monkeypatch.setattr(watch, "_EXPLAIN_POLLS", 2)
    monitor = _Monitor({1: "rank 1 (process 4 on host b)"}, {})
    monkeypatch.setattr(job.ranks[2], "_monitor", monitor)
    with pytest.raises(RankFailedError, match=r"connection to rank 1 .*has not answered") as raised:
        job.ranks[2].run(broken)
    assert isinstance(raised.value.__cause__, RuntimeError)
    found = job.wait_for(0)
    assert "the connection to rank 1 (process 4 on host b) was lost" in str(found)


def test_a_rank_that_waits_with_all_others_says_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "WARN_SECONDS", 0.3)
    for rank in job.ranks:
        rank.issue("the gather")
    job.all_publish()
    with caplog.at_level(logging.WARNING, "hytrain"), job.ranks[0].waiting():
        time.sleep(QUIET)
    assert not caplog.records


def test_waits_that_are_usual_alarm_nobody(job: Job) -> None:
    rank = job.ranks[0]
    rank._usual.append(0.6)  # as long as a step's backward takes
    job.ranks[1].tell(ValueError("injected"), final=False)
    begin = time.monotonic()
    with pytest.raises(RankFailedError), rank.waiting():
        assert rank._failed.wait(LONGEST_WAIT)
    assert time.monotonic() - begin > 1.7
    assert len(rank._usual) == 1, "a wait in vain is no usual one"


def test_a_lost_connection_is_made_again(job: Job) -> None:
    job.store.broken = 2
    time.sleep(0.3)
    assert all(rank._failure is None for rank in job.ranks)


def test_a_store_that_is_gone_is_a_failure(job: Job) -> None:
    job.store.broken = 10**9
    found = job.wait_for(0)
    assert isinstance(found, RankFailedError)
    assert "store cannot be reached" in str(found)


def test_what_ends_the_process_is_told(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every watch of this process is one of another rank here; rank 0's tells.
    for rank in job.ranks[1:]:
        crash_report.forget(rank)
    error = KeyError("the script's")
    sys.excepthook(KeyError, error, None)
    assert "the script's" in capsys.readouterr().err
    assert "rank 0 has failed" in str(job.wait_for(1))


def test_the_last_words_are_not_written_over(job: Job) -> None:
    job.ranks[1].tell(ValueError("the cause"), final=True)
    job.ranks[1].tell(ValueError("the end of the process"), final=False)
    assert "the cause" in str(job.wait_for(0))


def test_an_exception_that_passes_through_close_is_told(job: Job) -> None:
    def fails() -> None:
        try:
            raise OSError("disk")
        finally:
            job.ranks[0].close()

    with pytest.raises(OSError, match="disk"):
        fails()
    assert "OSError: disk" in str(job.wait_for(1))


def test_a_forked_childs_failure_is_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(watch.os, "getpid", lambda: -1)
        job.ranks[1].tell(ValueError("in a data loader"), final=True)
    assert not job.store.values


def test_the_end_of_the_data_is_no_failure(job: Job) -> None:
    try:
        next(iter(()))
    except StopIteration:
        job.ranks[0].close()
    assert job.finds_nothing(1)


def test_errors_of_others_are_not_passed_on(job: Job) -> None:
    job.ranks[1].tell(ValueError("first"), final=True)
    found = job.wait_for(0)
    assert found is not None
    job.ranks[0].tell(found, final=True)
    assert "first" in str(job.wait_for(2))
    assert "rank 1" in str(job.wait_for(2))


# -- two threads that find a failure at once ------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Job, RankWatch]]:
    """A rank whose threads do nothing of their own accord: the test makes their calls."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 30.0)
    job = Job(monkeypatch, world_size=2)
    yield job, job.ranks[0]
    for rank in job.ranks:
        rank.close()


def test_a_failure_is_not_replaced_by_one_that_was_found_beside_it(
    alone: tuple[Job, RankWatch], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, rank = alone
    rank._words.hear(Word(1, 1, "error", "ValueError: the cause", final=True, about=1))

    def mismatch(_histories: object) -> OutOfStepError:
        # Between this thread's look at the words and its verdict the monitor's thread decides.
        monitor = threading.Thread(target=rank._take_notice)
        monitor.start()
        monitor.join()
        return OutOfStepError("what follows of it")

    monkeypatch.setattr(rank, "_mismatch", mismatch)
    decide = rank._decide
    monkeypatch.setattr(rank, "_decide", lambda _number: None)  # it has found nothing before
    monkeypatch.setattr(rank, "_take_notice", lambda: decide(None))
    rank._must_read = True
    with caplog.at_level(logging.ERROR, "hytrain"):
        rank._look()
    assert "the cause" in str(rank._failure)
    assert len(caplog.records) == 1
    assert job.aborted == [0]


def test_two_threads_that_fail_at_once_report_one_failure(
    alone: tuple[Job, RankWatch], caplog: pytest.LogCaptureFixture
) -> None:
    job, rank = alone
    second_reported = threading.Event()
    second = threading.Thread(
        target=lambda: rank._fail(OutOfStepError("second"), is_seen_here_only=True)
    )

    class Handler(logging.Handler):
        """The first thread is held in its report until the other one reports, or half a second."""

        def createLock(self) -> None:
            self.lock = None  # a lock would hold the second thread's report

        def emit(self, record: logging.LogRecord) -> None:
            if "second" in record.getMessage():
                second_reported.set()
            else:
                second.start()
                second_reported.wait(0.5)

    handler = Handler()
    logging.getLogger("hytrain.comm.failure_watch").addHandler(handler)
    try:
        rank._fail(RankFailedError("first"))
        second.join(30)
    finally:
        logging.getLogger("hytrain.comm.failure_watch").removeHandler(handler)
    assert not second.is_alive()
    assert not second_reported.is_set()
    assert str(rank._failure) == "first"
    assert [record.getMessage() for record in caplog.records] == ["first"]
    assert job.aborted == [0]


def test_a_watch_that_was_closed_meanwhile_does_not_fail(alone: tuple[Job, RankWatch]) -> None:
    job, rank = alone
    rank.close()
    rank._fail(OutOfStepError("the other ranks have ended"))
    assert rank._failure is None
    assert not job.aborted


# -- collectives that cannot be interrupted -----------------------------------------------------


def test_a_collective_that_does_not_end_is_left(job: Job) -> None:
    release = threading.Event()
    try:
        job.ranks[0].tell(ValueError("gone"), final=True)
        with pytest.raises(RankFailedError, match="rank 0 has failed"):
            job.ranks[2].run(lambda: release.wait(30))
    finally:
        release.set()


def test_a_failed_collective_is_explained_where_somebody_knows(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        job.ranks[2].run(broken)
    job.ranks[1].tell(ValueError("the cause"), final=False)
    monkeypatch.setattr(watch, "_EXPLAIN_POLLS", 1500)  # 30 s at most
    with pytest.raises(RankFailedError, match="the cause") as raised:
        job.ranks[2].run(broken)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_error_of_a_lane_is_freed_with_all_frames_at_once() -> None:
    class Mine(Exception): ...

    def fail() -> None:
        raise Mine

    lane = DaemonExecutor()
    gc.disable()
    try:
        ended = lane.submit(fail)
        assert ended.wait(LONGEST_WAIT)
        try:
            ended.result()
        except Mine as error:
            gone = weakref.ref(error)
        assert lane.submit(lambda: None).wait(LONGEST_WAIT)
        assert gone() is None
    finally:
        gc.enable()
        lane.close()


def test_a_lane_keeps_the_order_and_nothing_else() -> None:
    lane = DaemonExecutor()
    order: list[int] = []
    ended = [lane.submit(lambda n=n: order.append(n)) for n in range(100)]
    assert ended[-1].wait(LONGEST_WAIT)
    assert order == list(range(100))
    lane.close()
    assert lane._thread is not None
    lane._thread.join(LONGEST_WAIT)
    assert not lane._thread.is_alive()
