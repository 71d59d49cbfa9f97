"""Ranks that were not started alike are told so before anything is built, with keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_agreement as cases
from harness import RankPools


def test_ranks_that_are_not_alike(ranks: RankPools) -> None:
    both = ranks(2).run(cases.not_alike, list(cases.DIFFERENT))
    assert both[0] == both[1]
    for name, (_, words) in cases.DIFFERENT.items():
        for word in words:
            assert word in both[0][name], name
    assert both[0]["rate"].count("\n") == 1, "one line for one difference"


def test_other_versions(ranks: RankPools) -> None:
    for text in ranks(2).run(cases.other_versions):
        assert "the version of hytrain is 0.0.9 on rank 0" in text
        assert "0.1.9 on rank 1" in text


@pytest.mark.parametrize("lacks", ["hytrain", "optimizer"])
def test_plain_deepspeed_on_one_rank(ranks: RankPools, lacks: str) -> None:
    text = ranks(2).run(cases.plain_on_one_rank, lacks)[0]
    assert "the engine is one of hytrain's on rank 0" in text
    assert "DeepSpeed's own (" in text
    assert lacks in text
    assert text.count("\n") == 1


def test_what_ranks_may_have_otherwise(ranks: RankPools, tmp_path: Path) -> None:
    said, nothing = ranks(2).run(cases.what_may_differ, str(tmp_path))
    assert nothing == []
    assert len(said) == 1
    assert "weights on ranks [1] are not those of rank 0" in said[0]


@pytest.mark.parametrize(("stage", "clipping"), [(1, 1.0), (2, 0.0), (3, 1.0)])
def test_a_scheduler_that_differs(ranks: RankPools, stage: int, clipping: float) -> None:
    for text in ranks(2).run(cases.scheduler_on_one_rank, stage, clipping):
        assert '"lr" of parameter group 0 is 0.01 on rank 0; 0.02 on rank 1' in text
