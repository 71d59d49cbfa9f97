"""For all tests: an accelerator for DeepSpeed, and one process group a test session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    # DeepSpeed looks for an accelerator when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU are skipped where there is none, whatever was asked for."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def process_group() -> None:
    """A group of one rank, joined at the first test that builds an engine."""
    from support.engines import join_process_group

    join_process_group()
