"""Ranks for the cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import RankPools


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Ranks that live as long as a file's tests."""
    found = RankPools()
    yield found
    found.close()
