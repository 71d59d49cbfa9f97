"""Ranks that live as long as the test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """``ranks(2).run(function, ...)``: see harness.py."""
    pools = RankPools()
    yield pools
    pools.close()
