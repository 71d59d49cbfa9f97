"""Two ranks with models, and uses of them, that are not the usual ones."""

from __future__ import annotations

import pytest
import rank_models as cases
from harness import RankPools

pytestmark = pytest.mark.timeout(240)

stages = pytest.mark.parametrize("stage", [1, 2, 3])


@stages
@pytest.mark.parametrize("kind", sorted(cases.KINDS))
def test_unusual_models(ranks: RankPools, kind: str, stage: int) -> None:
    ranks(2).run(cases.unusual_models, kind, stage)


def test_weights_that_backward_lacks(ranks: RankPools) -> None:
    ranks(2).run(cases.weights_that_backward_lacks)


@stages
def test_two_forwards_and_one_backward(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.two_forwards, stage)


@pytest.mark.parametrize("failed", [0, 1])
@pytest.mark.parametrize("gathers", ["each", "kept"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_number_of_forwards_that_changes(
    ranks: RankPools, stage: int, gathers: str, failed: int
) -> None:
    ranks(2).run(cases.a_changing_number_of_forwards, stage, gathers, failed)
