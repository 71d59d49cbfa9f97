"""For all tests: an accelerator for DeepSpeed, one process group and ranks for a test session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# No time limit for an example: that a busy machine is slow is no defect. The same examples each
# time, so that a failure comes from the change; for others see CONTRIBUTING.md.
_UNHURRIED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("random", **_UNHURRIED)
hypothesis.settings.register_profile(
    "same", derandomize=True, database=None, max_examples=50, **_UNHURRIED
)
hypothesis.settings.load_profile("same")

# DeepSpeed looks for an accelerator when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
ON_GPU = os.environ.get("DS_ACCELERATOR") != "cpu"
"""Whether engines of this process put their models on a GPU."""
# Idle OpenMP threads would spin on the cores of other tests' processes. Read at torch's import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a GPU, or a CPU alone, where there is none, whatever was asked for."""
    marker, reason = ("cpu", "expects models on a CPU") if ON_GPU else ("gpu", "needs a GPU")
    for item in items:
        if item.get_closest_marker(marker) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """On a GPU, the tensors of tests that were written for a CPU follow the module."""
    if ON_GPU:
        from support.on_gpu import follow_modules

        follow_modules(item.get_closest_marker("gpu") is None)


@pytest.fixture(scope="session")
def process_group() -> None:
    """A group of one rank, joined at the first test that builds an engine."""
    from support.engines import join_process_group

    join_process_group()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """``ranks(2).run(function, ...)``, on the session's ranks: see tests/dist/harness.py."""
    from harness import RankPools

    pools = RankPools()
    yield pools
    pools.close()
