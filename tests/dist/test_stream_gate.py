"""The gate in front of collectives, by ranks whose streams are threads and run at random speeds.

On GPUs: test_two_gpus.py.
"""

from __future__ import annotations

import glob
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import rank_gate as cases
from harness import RankPools

from hytrain.comm import stream_gate


def test_no_collective_starts_before_all_have_come_to_it(ranks: RankPools, tmp_path: Path) -> None:
    found = ranks(3).run(cases.nobody_starts_early, str(tmp_path / "ready"))
    assert [gated for gated, _ in found] == [0, 0, 0]
    assert sum(free for _, free in found) > 0, "the ranks are never apart: nothing is shown"


def test_numbers_may_wrap(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks(2).run(cases.numbers_may_wrap, str(tmp_path / "ready")) == [0, 0]


def test_ranks_without_common_memory_do_not_wait(ranks: RankPools, tmp_path: Path) -> None:
    arguments = str(tmp_path / "ready"), str(tmp_path)
    found = ranks(3).run(cases.two_of_three_share_memory, *arguments)
    assert [others for others, _ in found] == [[2], [], [0]]


def test_a_rank_that_failed_is_not_waited_for(ranks: RankPools) -> None:
    assert max(ranks(2).run(cases.a_rank_never_comes)) < cases.SECONDS


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[cases.Pair]:
    pair = cases.Pair(str(tmp_path / "flags"))
    yield pair
    pair.close()


def test_a_number_that_was_queued_before_the_gate_opened_holds_nobody(pair: cases.Pair) -> None:
    """Rank 0's device writes an old number over the flag that rank 1's host has set ahead."""
    computed = pair.hold(0)
    pair.gates[0].arrive()
    reached = pair.hold(1)
    pair.gates[1].arrive()
    pair.gates[1].arrive()  # rank 0 does not come to this one
    pair.gates[1].open_for_good()
    assert pair.is_ahead(0)
    computed.set()
    assert pair.streams[0].synchronize()  # its number is written
    reached.set()
    assert pair.streams[1].synchronize(), "rank 1 waits for a number that never comes"


def test_a_gate_that_opens_while_a_rank_arrives_holds_nobody(pair: cases.Pair) -> None:
    """Rank 0 has seen that the gate is closed, and queues its number when it is open."""
    stream = pair.gate_streams[0]
    follow = stream.follow

    def open_before() -> None:
        pair.gates[0].open_for_good()
        for thread in threading.enumerate():
            if thread.name == "hytrain-gate":
                thread.join(0.2)  # the stream has nothing to do yet: that must not be its end
        follow()

    with mock.patch.object(stream, "follow", open_before):
        pair.gates[0].arrive()
    assert pair.streams[0].synchronize()  # its number is written
    pair.gates[1].arrive()
    pair.gates[1].arrive()  # rank 0 does not come to this one
    assert pair.streams[1].synchronize(), "rank 1 waits for a number that never comes"


def test_the_end_of_a_rank_leaves_its_flag_ahead(
    pair: cases.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own device's last number is written while the gate is being closed."""
    monkeypatch.setattr(stream_gate, "_AHEAD_SECONDS", 30.0)  # nothing else sets it ahead again
    computed = pair.hold(0)
    pair.gates[0].arrive()
    stream = pair.gate_streams[0]
    is_idle = stream.is_idle

    def write_then_look() -> bool:
        computed.set()
        assert pair.streams[0].synchronize()
        return is_idle()

    with mock.patch.object(stream, "is_idle", write_then_look):
        pair.gates[0].close()
    assert pair.is_ahead(0)


def test_an_abort_that_comes_late_touches_no_memory_that_was_given_back(pair: cases.Pair) -> None:
    pair.gates[0].open_for_good()
    pair.gates[0].close()
    with mock.patch.object(cases.SharedFlags, "set") as written:
        pair.gates[0].open_for_good()
    written.assert_not_called()
    assert "hytrain-gate" not in [thread.name for thread in threading.enumerate()]


def test_where_memory_cannot_be_shared_nobody_waits(ranks: RankPools) -> None:
    assert ranks(2).run(cases.no_such_memory) == [True, True]


def test_a_device_that_does_not_write_has_no_gate(ranks: RankPools) -> None:
    """Others go without that rank; in a step it would have raised, or waited for ever."""
    for how in ("refuses", "loses"):
        assert ranks(3).run(cases.one_device_cannot, how) == [[2], [], [0]]


def test_a_rank_that_does_not_want_to_wait_is_left_out(ranks: RankPools) -> None:
    assert ranks(3).run(cases.one_does_not_want_to) == [[2], [], [0]]


def test_the_end_does_not_wait_for_a_collective_that_never_ends(ranks: RankPools) -> None:
    for seconds, is_kept in ranks(2).run(cases.closed_behind_what_never_ends):
        assert seconds < cases.SECONDS
        assert is_kept, "the stream may still read it"


def test_no_file_is_left() -> None:
    assert not glob.glob("/dev/shm/hytrain-gate-*")
