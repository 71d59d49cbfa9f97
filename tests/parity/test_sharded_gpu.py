"""On a GPU, ZeRO-3 and weights streamed from the host do what ZeRO-2 does, bit for bit.

Gathers, releases and streamed weights run on other streams than compute here, which no CPU test
sees. Everything is made deterministic; the first test shows with ZeRO-2 alone that it is. Two GPUs
are in tests/dist/test_two_gpus.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.sharded import assert_same, deterministic, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("process_group", "repeatable"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def repeatable() -> Iterator[None]:
    with deterministic():
        yield


@pytest.fixture(scope="module")
def stage2(process_group: None) -> dict[float, Any]:
    """ZeRO-2's results by gpu_fraction, trained on first use."""
    del process_group
    return {}


def reference(stage2: dict[float, Any], gpu_fraction: float) -> Any:
    if gpu_fraction not in stage2:
        stage2[gpu_fraction] = train(2, gpu_fraction)
    return stage2[gpu_fraction]


def test_zero2_repeats_itself(stage2: dict[float, Any]) -> None:
    assert_same(train(2, 0.0), reference(stage2, 0.0))


@pytest.mark.parametrize("delays", [None, 1, 2])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
@pytest.mark.parametrize("streamed", [False, True], ids=["sharded", "streamed"])
def test_zero3_is_zero2(
    stage2: dict[float, Any], streamed: bool, gpu_fraction: float, delays: int | None
) -> None:
    ours = train(3, gpu_fraction, streamed=streamed, delays=delays)
    assert_same(ours, reference(stage2, gpu_fraction))
