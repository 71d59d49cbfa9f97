"""Engines of one rank."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_rank(process_group: None) -> None:
    """Tests here build engines in a group of one rank."""
