"""fp16's loss scale, and what gradients are reduced in, on 2 ranks."""

from __future__ import annotations

import pytest
import rank_precision as cases
from harness import RankPools

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scale_moves_as_deepspeeds(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.scale_moves_as_deepspeeds, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_sum_would_overflow(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.sum_would_overflow, stage)


@pytest.mark.parametrize(
    ("stage", "accumulated", "communicated"),
    [(2, "fp32", "bf16"), (3, "fp32", "fp16"), (1, "bf16", "fp32"), (2, "bf16", "bf16")],
)
def test_communication_dtype(
    ranks: RankPools, stage: int, accumulated: str, communicated: str
) -> None:
    ranks(2).run(cases.communication_dtype, stage, accumulated, communicated)
