"""As test_parity_serial.py on two ranks, with equal and unequal shards."""

from __future__ import annotations

import pytest
from dist.harness import RankPools
from parity_cases import TWO_RANKS, TWO_RANKS_FULL
from support.comparisons import check_parity
from support.parity import Case

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_covering_selection(case: Case, ranks: RankPools) -> None:
    for figures in ranks(2).run(check_parity, case):
        assert figures["steps"] == 50


@pytest.mark.parity_full
@pytest.mark.parametrize("case", TWO_RANKS_FULL, ids=str)
def test_every_combination(case: Case, ranks: RankPools) -> None:
    ranks(2).run(check_parity, case)
