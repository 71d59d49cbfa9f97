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


def test_the_variable_is_0_or_1(ranks: RankPools) -> None:
    for words in ranks(2).run(cases.a_variable_that_says_neither, "true"):
        assert 'HYTRAIN_WAIT_IN_STREAM is "true": set it to 1 or 0' in words
    for value in ("0", "1"):  # gloo's ranks wait on the host, whatever it says
        assert ranks(2).run(cases.a_variable_that_says_neither, value) == ["", ""]


def test_no_file_is_left() -> None:
    assert not glob.glob("/dev/shm/hytrain-gate-*")
