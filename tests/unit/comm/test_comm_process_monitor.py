"""What the monitor's threads may still do when it has been closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hytrain.comm import peers
from hytrain.comm.failure_messages import Words
from hytrain.comm.peers import Peers
from hytrain.comm.process_monitor import ProcessMonitor
from hytrain.comm.processes import this_process
from hytrain.comm.rank_status import StatusStore

pytestmark = pytest.mark.timeout(60)


class BlockedStatus(StatusStore):
    """A store whose first answer takes as long as the test says; the other rank is not there."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        self.notes: list[str] = []

    def put(self, kind: str, value: Any) -> None:
        self.notes.append(kind)

    def find(self, kind: str, rank: int) -> Any:
        self.asked.set()
        assert self.answer.wait(30)


def test_a_monitor_that_was_closed_does_not_begin_to_listen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = BlockedStatus()
    listened: list[bool] = []
    listen, close = Peers.listen, Peers.close

    def recorded(self: Peers, *, is_one_host: bool) -> peers.Address:
        listened.append(is_one_host)
        return listen(self, is_one_host=is_one_host)

    def close_and_answer(self: Peers) -> None:
        close(self)
        status.answer.set()  # the greeter goes on when nothing will close its socket any more

    monkeypatch.setattr(Peers, "listen", recorded)
    monkeypatch.setattr(Peers, "close", close_and_answer)
    monitor = ProcessMonitor(
        0, 2, this_process(), status, Words(0), state=lambda: (-1, ""), notice=lambda: None
    )
    assert status.asked.wait(30)
    monitor.close()
    monitor._greeter.join(30)
    assert not monitor._greeter.is_alive()
    assert not listened
    assert status.notes == ["process"]
