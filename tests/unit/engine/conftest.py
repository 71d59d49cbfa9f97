"""Engines of one rank."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_rank(process_group: None) -> None:
    """Every test here builds engines in a group of one rank."""
