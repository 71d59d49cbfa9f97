"""Random cases on one GPU and on two, with delays on every stream and at every hand-off."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import RankPools

from fuzz.drawing import draw
from fuzz.run import run_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("ranks", "first"), [(1, n) for n in range(0, 300, 50)] + [(2, 300), (2, 350)]
)
def test_cases_with_delays(ranks: int, first: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    with contextlib.closing(RankPools(on_gpu=True)) as pools:
        summary = run_cases(
            pools, [draw(seed, ranks) for seed in range(first, first + 50)], on_gpu=True
        )
    assert not summary.failed, "\n".join(summary.failed.values())
