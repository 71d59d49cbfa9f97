"""Master weights, moments and gradients by DeepSpeed's functions, and zero_grad(), on 2 ranks."""

from __future__ import annotations

import pytest
import rank_access as cases
from harness import RankPool, RankPools

pytestmark = pytest.mark.timeout(240)

EVEN, UNEVEN = (0.5, 0.5), (0.7, 0.3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_same_as_deepspeed(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.same_as_deepspeed, UNEVEN, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_written_state_is_trained_on(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.written_state_is_trained_on, UNEVEN, stage)


@pytest.mark.parametrize("fractions", [EVEN, UNEVEN, (0.95, 0.05)], ids=str)
def test_local_parts(ranks: RankPools, fractions: tuple[float, ...]) -> None:
    ranks(2).run(cases.local_parts, fractions)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_dict_round_trip(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.state_dict_round_trip, UNEVEN, stage)


def test_a_rank_alone() -> None:
    with RankPool(2) as pool:  # of its own: what hangs there afterwards is in nobody's way
        pool.run(cases.a_rank_alone, EVEN)


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_grad_in_a_window(ranks: RankPools, stage: int, after: int) -> None:
    ranks(2).run(cases.zero_grad_in_a_window, UNEVEN, stage, after)


def test_zero_grad_on_one_rank_alone() -> None:
    with RankPool(2) as pool:
        pool.run(cases.zero_grad_on_one_rank_alone, EVEN)


def test_zero_grad_after_direct_commits(ranks: RankPools) -> None:
    ranks(2).run(cases.zero_grad_after_direct_commits, EVEN)
