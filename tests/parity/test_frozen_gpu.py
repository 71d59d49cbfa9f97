"""On a GPU, frozen weights that are streamed from the host do what resident ones do, bit for bit.

The GPU need not hold them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from support.sharded import Trained, assert_same, deterministic, train, train_adapters

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
def resident(process_group: None) -> dict[str, Trained]:
    """ZeRO-2's results by what is frozen, trained on first use."""
    del process_group
    return {}


@pytest.mark.parametrize("delays", [None, 1])
@pytest.mark.parametrize("frozen", ["lora", "last", "only_embeddings"])
def test_streamed_is_resident(
    resident: dict[str, Trained], frozen: str, delays: int | None
) -> None:
    if frozen not in resident:
        resident[frozen] = train(2, 0.5, frozen=frozen)
    assert_same(train(3, 0.5, streamed=True, delays=delays, frozen=frozen), resident[frozen])


def test_the_gpu_need_not_hold_the_frozen_weights() -> None:
    found: dict[bool, tuple[list[float], int]] = {}
    weights = 0
    for streamed in (True, False):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        losses, weights = train_adapters(streamed=streamed)
        found[streamed] = losses, torch.cuda.max_memory_allocated() - before
    print(f"{weights} bytes of weights; at most {found[True][1]} streamed, {found[False][1]} else")
    assert found[True][0] == found[False][0]
    assert found[False][1] > weights
    assert found[True][1] < weights / 2
