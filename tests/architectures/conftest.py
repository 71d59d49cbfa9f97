"""For tests of many models: ranks that live as long as a file's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import RankPools


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Like the fixture of tests/conftest.py, for the tests of a file."""
    pools = RankPools()
    yield pools
    pools.close()
