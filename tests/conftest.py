"""For all tests: an accelerator for DeepSpeed, and one process group a test session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    # DeepSpeed looks for an accelerator when it is imported.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def process_group() -> None:
    """A group of one rank, joined at the first test that builds an engine."""
    from support.engines import join_process_group

    join_process_group()
