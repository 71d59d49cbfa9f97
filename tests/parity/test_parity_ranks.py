"""As test_parity_serial.py on two ranks, with equal and unequal shards."""

from __future__ import annotations

import pytest
import torch
from dist.harness import RankPools
from parity_cases import SHARDS, TWO_RANKS, TWO_RANKS_FULL
from support.comparisons import check_parity
from support.engines import environment
from support.parity import Case

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_covering_selection(case: Case, ranks: RankPools) -> None:
    for figures in ranks(2).run(check_parity, case):
        assert figures["steps"] == 50


def check_with_delays(case: Case, seed: int) -> None:
    """Runs on every rank; the ranks' delays differ."""
    with environment("HYTRAIN_DELAYS", f"{seed + 100 * torch.distributed.get_rank()}:400"):
        check_parity(case)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.parity_full)])
@pytest.mark.parametrize("fractions", SHARDS, ids=str)
def test_with_delays_at_every_hand_off(
    fractions: tuple[float, ...], seed: int, ranks: RankPools
) -> None:
    case = Case("llama", 0.3, "sometimes", 1, "bf16", fractions=fractions, steps=25)
    ranks(2).run(check_with_delays, case, seed)


@pytest.mark.parity_full
@pytest.mark.parametrize("case", TWO_RANKS_FULL, ids=str)
def test_every_combination(case: Case, ranks: RankPools) -> None:
    ranks(2).run(check_parity, case)
