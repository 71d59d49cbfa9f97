"""What ranks do between backward and step(): nothing hangs, and no step differs by it."""

from __future__ import annotations

import pytest
import rank_open_steps as cases
from harness import RankPools

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("what", cases.BETWEEN)
def test_one_rank_leaves_a_layer_out(ranks: RankPools, what: str, stage: int) -> None:
    ranks(2).run(cases.together_before_step, what, stage, 1, False)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("what", ["all_reduce", "gradients", "zero_grad"])
def test_the_same_in_a_window_of_plain_backwards(ranks: RankPools, what: str, stage: int) -> None:
    ranks(2).run(cases.together_before_step, what, stage, 2, True)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_bit_of_a_step_differs_by_it(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.ways_differ_by_nothing, stage)


@pytest.mark.parametrize("aborted", [0, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_aborted_window_begins_anew(ranks: RankPools, stage: int, aborted: int) -> None:
    ranks(2).run(cases.windows_that_are_aborted, stage, aborted)
