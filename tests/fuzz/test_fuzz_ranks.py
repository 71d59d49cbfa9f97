"""Random cases on two and three ranks, always the same ones: `make test-fuzz` has others."""

from __future__ import annotations

import pytest
from harness import RankPools

from fuzz.run import fixed_cases, run_cases

CHUNKS = 16
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_cases_of_several_ranks(pools: RankPools, chunk: int) -> None:
    cases = [case for case in fixed_cases() if case.ranks > 1][chunk::CHUNKS]
    summary = run_cases(pools, cases)
    assert not summary.failed, "\n".join(summary.failed.values())
    assert summary.ended.total() == len(cases) > 0
