"""What the ranks' control plane costs as ranks grow: questions to the store are counted.

Ranks are objects in threads of one process. Nothing may grow faster than ranks times their
logarithm; a rank that reads every other one's notes would. 512 ranks over torch's own store:
``make test-stress``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hytrain.comm import agreement, failure_watch, outbox, rank_status, waits
from hytrain.comm.failure_watch import RankWatch
from hytrain.errors import RankFailedError

pytestmark = pytest.mark.timeout(280)

RANKS = [
    8,
    pytest.param(64, marks=pytest.mark.parity_full),
    pytest.param(512, marks=pytest.mark.stress),
]
MANY = 100
"""Ranks from which on the store is torch's, with a connection for each."""
PER_RANK = 24
"""Most questions of a rank, of those that a case counts."""


class CountedStore:
    """A store, and what it was asked."""

    timeout = timedelta(seconds=200)

    def __init__(self, num_ranks: int) -> None:
        self.asked: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_real = num_ranks >= MANY
        self._own = threading.local()
        self._store: Any = dist.HashStore()
        if self._is_real:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def _count(self, call: str, key: str, number: int) -> Any:
        kind = key.rstrip("0123456789").rstrip("/").rpartition("/")[2]
        with self._lock:
            self.asked[f"{call} {kind}"] += number
        if not self._is_real:
            return self._store
        if not hasattr(self._own, "store"):
            self._own.store = self._store.clone()
        return self._own.store

    def set(self, key: str, value: str) -> None:
        self._count("set", key, 1).set(key, value)

    def get(self, key: str) -> bytes:
        return self._count("get", key, 1).get(key)

    def add(self, key: str, amount: int) -> int:
        return self._count("add", key, 1).add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._count("check", keys[0], len(keys)).check(keys)


class _OfThread(dict[Any, Any]):
    """A counter of each thread's own: each is a process elsewhere."""

    def __getitem__(self, name: object) -> int:
        return self.get((threading.get_ident(), name), 0)

    def __setitem__(self, name: object, value: int) -> None:
        super().__setitem__((threading.get_ident(), name), value)


@contextmanager
def _as_ranks(number: int, store: CountedStore) -> Iterator[Callable[[Callable[[int], Any]], Any]]:
    """Runs a function for each rank, at the same time."""
    rank = threading.local()

    def run(function: Callable[[int], Any]) -> list[Any]:
        def of_rank(own: int) -> Any:
            rank.own = own
            together.wait()
            return function(own)

        together = threading.Barrier(number)
        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(of_rank, range(number)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda _group=None: rank.own)
        patch.setattr(dist, "get_process_group_ranks", lambda _group: list(range(number)))
        patch.setattr(distributed_c10d, "_get_default_store", lambda: store)
        patch.setattr(agreement, "_started", _OfThread())
        yield run


def _without_polls(asked: Counter[str], *kinds: str) -> int:
    """Questions in all, but for those that are repeated while a rank waits."""
    return sum(number for name, number in asked.items() if name.partition(" ")[2] not in kinds)


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_are_alike(ranks: int) -> None:
    store = CountedStore(ranks)
    with _as_ranks(ranks, store) as run:
        found = run(lambda _: agreement.compare({"a": "1"}, None, sample="s"))
    print(f"\n{ranks} ranks: {dict(sorted(store.asked.items()))}")
    assert all(not each.differences and not each.other_samples for each in found)
    assert _without_polls(store.asked) - store.asked["check outcome"] <= 4 * ranks + 1
    assert store.asked["get hash"] == ranks, "of one rank, for all"


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_are_all_different(ranks: int) -> None:
    """Each is told of a few."""
    store = CountedStore(ranks)
    with _as_ranks(ranks, store) as run:
        found = run(lambda rank: agreement.compare({"a": f"value {rank}"}, None, sample=str(rank)))
    lines = {tuple(each.differences) for each in found}
    assert len(lines) == 1
    (line,) = lines.pop()
    assert "value 0 on rank 0 (host " in line
    assert len(line) < 1000
    counted = _without_polls(store.asked, "outcome", "read")
    assert counted - store.asked["check facts"] <= PER_RANK * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_that_does_not_come(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others say so, and some of them which one it is."""
    store = CountedStore(ranks)
    monkeypatch.setattr(CountedStore, "timeout", timedelta(seconds=1 if ranks < MANY else 8))
    absent = ranks // 2

    def come(rank: int) -> str:
        if rank == absent:
            return ""
        with pytest.raises(RankFailedError) as raised:
            agreement.compare({"a": "1"}, None)
        return str(raised.value)

    with _as_ranks(ranks, store) as run:
        texts = run(come)
    named = [text for text in texts if f"rank {absent} has not come" in text]
    assert len(named) == min(ranks - 1, agreement._MOST_ASKING)
    assert all(
        text in named or f"1 of {ranks} ranks have not come" in text for text in texts if text
    )
    # By halves: twice as many keys as there are ranks.
    assert store.asked["check hash"] <= 3 * ranks * agreement._MOST_ASKING


class Watches:
    """Ranks that watch each other, as in training."""

    def __init__(self, number: int) -> None:
        self.store = CountedStore(number)
        self.ranks = [
            RankWatch(
                rank, number, connect=lambda: self.store, abort=lambda: None, prefix="a job",
                can_interrupt=True,
            )
            for rank in range(number)
        ]  # fmt: skip

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            list(pool.map(lambda rank: rank.close(), self.ranks))

    def reads(self, kind: str) -> int:
        return self.store.asked[f"get {kind}"]


@pytest.fixture(params=RANKS)
def watches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watches]:
    if request.param < MANY:
        monkeypatch.setattr(rank_status, "_MOST_WORDS", 4)
        monkeypatch.setattr(rank_status, "_MOST_WARNERS", 2)
    # Many ranks in one process look at the store less often: they have one interpreter.
    slower = max(1.0, request.param / 20)
    monkeypatch.setattr(waits, "PATIENCE_SECONDS", slower)
    for name, seconds in (("POLL", 0.1), ("WARN", 1.5), ("ASK", 0.5)):
        monkeypatch.setattr(failure_watch, f"{name}_SECONDS", slower * seconds)
    monkeypatch.setattr(outbox, "_FLUSH_SECONDS", 10.0 * slower)
    logging.getLogger("hytrain").setLevel(logging.CRITICAL)
    watches = Watches(request.param)
    yield watches
    watches.close()
    print(f"\n{request.param} ranks: {dict(sorted(watches.store.asked.items()))}")
    logging.getLogger("hytrain").setLevel(logging.NOTSET)


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_failure_reaches_all(watches: Watches) -> None:
    """Each then says that it ends, and none but rank 0 reads what all have said."""
    ranks = len(watches.ranks)
    watches.ranks[-1].tell(ValueError("the cause"), final=True)
    _wait(lambda: all(rank._failure is not None for rank in watches.ranks[:-1]))
    assert all("the cause" in str(rank._failure) for rank in watches.ranks[:-1])
    watches.close()
    assert watches.reads("word") <= (2 * rank_status._MOST_WORDS + 1) * ranks


def test_all_end_at_once(watches: Watches) -> None:
    ranks = len(watches.ranks)
    begin = time.monotonic()
    watches.close()
    assert time.monotonic() - begin < outbox._FLUSH_SECONDS
    assert all(rank._failure is None for rank in watches.ranks)
    # Each looks a few times until it has said that it leaves.
    assert watches.reads("word") <= (3 * rank_status._MOST_WORDS + 1) * ranks


def test_all_wait_for_one(watches: Watches) -> None:
    """A few find out where all stand."""
    ranks = len(watches.ranks)
    if ranks >= MANY:
        pytest.skip(
            "in one process the stacks of so many ranks, which each publishes, take minutes"
        )
    for rank in watches.ranks:
        rank.issue("a collective")
    waiting = [rank.waiting() for rank in watches.ranks[1:]]
    for each in waiting:
        each.__enter__()
    most = rank_status._MOST_WARNERS
    _wait(lambda: watches.store.asked["add warners"] > min(most, ranks - 2))
    _wait(lambda: watches.store.asked["check standing"] >= min(most, ranks - 1) * ranks)
    time.sleep(1.0)
    for each in waiting:
        each.__exit__(None, None, None)
    assert watches.store.asked["check standing"] <= most * ranks
