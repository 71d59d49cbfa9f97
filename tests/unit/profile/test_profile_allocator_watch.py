"""Retries of the allocator are told once, where they go on."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from hytrain.placement.allocator_watch import AllocatorWatch, advise_on_gaps, retries_of
from hytrain.placement.memory_probe import LOOK_EVERY


def warnings_of(caplog: pytest.LogCaptureFixture, counts: list[int], looks: int = 0) -> list[str]:
    """What is said where a look at every tenth step sees these counts."""
    seen = iter(counts)
    watch = AllocatorWatch(lambda: next(seen))
    with caplog.at_level(logging.WARNING):
        for step in range(1, LOOK_EVERY * (looks or len(counts)) + 1):
            watch.after_step(step)
    return [record.getMessage() for record in caplog.records]


def test_warns_once_of_retries_that_go_on_and_counts_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (text,) = warnings_of(caplog, [4, 9, 12], looks=20)
    assert "8 times in the last 20 steps" in text
    assert "expandable_segments:True" in text
    assert "hytrain.solver.gpu_memory_reserve_bytes" in text


@pytest.mark.parametrize(
    "counts",
    [[7, 7, 7, 7], [0, 3, 3, 5, 5, 6, 6], [5, 6], [0, 5, 0, 0]],
    ids=["before the first look", "now and then", "only once", "statistics were reset"],
)
def test_a_retry_now_and_then_is_no_harm(
    caplog: pytest.LogCaptureFixture, counts: list[int]
) -> None:
    assert warnings_of(caplog, counts) == []


def test_without_a_gpu_there_is_nothing_to_watch(caplog: pytest.LogCaptureFixture) -> None:
    assert retries_of(torch.device("cpu")) is None
    watch = AllocatorWatch(None)
    for step in range(100):
        watch.after_step(step)
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_counts() -> None:
    """A block that fits only once what is cached has been given back."""
    mib = 2**20
    device = torch.device("cuda", torch.cuda.current_device())
    count = retries_of(device)
    assert count is not None
    gc.collect()  # what an earlier test left would be freed meanwhile, and make room
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved(device) + 600 * mib
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    try:
        before = count()
        for size in (400, 500):
            torch.empty(size * mib, dtype=torch.uint8, device=device)
        assert count() == before + 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.parametrize(
    ("planned", "environment", "warns"),
    [
        (95, {}, True),
        (85, {}, False),
        (95, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, False),
        (95, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
        (95, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, True),
    ],
)
def test_a_plan_that_fills_the_memory_has_no_room_for_gaps(
    caplog: pytest.LogCaptureFixture, planned: int, environment: dict[str, str], warns: bool
) -> None:
    advise_on_gaps(planned * 2**30, 100 * 2**30, environment=environment)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == warns
    for text in texts:
        assert "95% of the 100.0 GiB" in text
        assert "expandable_segments:True" in text
    caplog.clear()
    advise_on_gaps(97 * 2**30, 100 * 2**30, planned * 2**30, environment)
    told_before = warns
    assert len(caplog.records) == (not told_before and "True" not in str(environment))
