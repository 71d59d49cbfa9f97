"""Where a thread stands, and which ranks cannot come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from hytrain.comm import deadlock
from hytrain.comm.call_sites import Standing, ThreadSampler
from hytrain.comm.deadlock import never_comes

pytestmark = pytest.mark.timeout(60)

BARRIER = Standing("train.py:7 in main", "barrier", "0", (0, 1, 2), None, 9, 40.0)
COMPUTES = Standing("model.py:3 in forward", seconds=0.1)


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> dict[str, int | None]:
    """Collectives that this rank has begun, by group."""
    begun: dict[str, int | None] = {"0": 9, "other": 3}
    monkeypatch.setattr(deadlock, "sequence_here", lambda name, ranks: begun[name])
    return begun


def judged(
    there: Standing | None, *, third: Standing | None = None, third_waits: float = 40.0
) -> str | None:
    """What rank 0 finds, after 50 seconds, of rank 1."""

    def history(where: Standing | None, waited: float) -> dict[str, Any]:
        return {"standing": None if where is None else asdict(where), "waited": waited}

    histories = {0: history(COMPUTES, 50.0), 1: history(there, 0.0)}
    histories[2] = history(third, third_waits)
    return never_comes(0, [1], histories, 50.0, global_rank=lambda rank: rank, group_name="0")


def test_a_barrier_that_waits_for_this_rank(sequences: dict[str, int | None]) -> None:
    text = judged(BARRIER)
    assert text is not None
    assert "Rank 1 has been in torch.distributed.barrier(), called at train.py:7 in main" in text


@pytest.mark.parametrize(
    "there",
    [
        COMPUTES,
        None,
        replace(BARRIER, seconds=10.0),
        replace(BARRIER, ranks=(1, 2)),
        replace(BARRIER, call="send"),
        replace(BARRIER, call="broadcast", source=1),
        replace(BARRIER, sequence=None),
        replace(BARRIER, sequence=8),  # this rank has begun it, and does not wait for it
        replace(BARRIER, group="other", sequence=3),
    ],
    ids=str,
)
def test_what_may_still_come(sequences: dict[str, int | None], there: Standing | None) -> None:
    assert judged(there) is None


@pytest.mark.parametrize(
    "there",
    [
        replace(BARRIER, call="broadcast", source=0),
        replace(BARRIER, call="all_gather_object"),
        replace(BARRIER, group="other", sequence=4),
    ],
    ids=str,
)
def test_other_calls_that_wait_for_this_rank(
    sequences: dict[str, int | None], there: Standing
) -> None:
    assert judged(there) is not None


def test_a_group_that_is_not_known_here(sequences: dict[str, int | None]) -> None:
    sequences["0"] = None
    assert judged(BARRIER) is None


def test_a_third_rank_that_computes_may_be_waited_for(sequences: dict[str, int | None]) -> None:
    assert judged(BARRIER, third=COMPUTES, third_waits=0.0) is None
    assert judged(BARRIER, third=BARRIER, third_waits=0.0) is not None


class Doing:
    """A thread that does something until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.thread = threading.Thread(target=self.wait, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        self.go.wait()


@pytest.fixture
def doing() -> Iterator[Doing]:
    doing = Doing()
    yield doing
    doing.go.set()
    doing.thread.join()


def test_a_thread_stands_at_a_line_of_the_script(doing: Doing) -> None:
    assert doing.thread.ident is not None
    sampler = ThreadSampler(doing.thread.ident)
    deadline = time.monotonic() + 30
    later = sampler.look()
    while later is not None and later.seconds < 0.3 and time.monotonic() < deadline:
        time.sleep(0.05)  # it may be on its way there
        later = sampler.look()
    assert later is not None
    assert later.seconds >= 0.3
    assert later.call is None
    assert later.place.startswith(__file__)
    assert later.place.endswith("in wait")
    assert Standing.unpacked(asdict(later)) == later


def test_a_thread_that_has_ended_stands_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    assert thread.ident is not None
    sampler = ThreadSampler(thread.ident)
    thread.join()
    assert sampler.look() is None
