"""Ranks for the parity tests on two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dist.harness import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """``ranks(2).run(function, ...)``: see tests/dist/harness.py."""
    pools = RankPools()
    yield pools
    pools.close()
