"""The gate in front of collectives, by ranks whose streams are threads and run at random speeds.

On GPUs: test_two_gpus.py.
"""

from __future__ import annotations

import glob
from pathlib import Path

import rank_gate as cases
from harness import RankPools


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
    assert max(ranks(2).run(cases.a_rank_never_comes)) < 5.0


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
        assert seconds < 5.0
        assert is_kept, "the stream may still read it"


def test_no_file_is_left() -> None:
    assert not glob.glob("/dev/shm/hytrain-gate-*")
