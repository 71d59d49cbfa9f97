"""Full garbage collections come in the same steps on all ranks, and not elsewhere in a step."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import backward
from support.engines import built, from_all_ranks, make_config
from support.models import make_model

from hytrain.engine import full_collections

STEPS = 60
OFTEN = (50, 2, 10)
"""Thresholds with which steps of a small model collect as often as those of a large one."""


@contextmanager
def thresholds(*values: int) -> Generator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*values)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def full_collections_of(engine: Any, garbage: int) -> list[int]:
    """The steps in which full collections end, as each rank makes ``garbage`` lists in a step."""
    found: list[int] = []
    step = 0

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            found.append(step)

    gc.collect()
    gc.callbacks.append(note)
    try:
        for step in range(1, STEPS + 1):
            kept = [[] for _ in range(garbage)]
            backward(engine, step)
            engine.step()
            del kept
    finally:
        gc.callbacks.remove(note)
    return found


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@on_ranks(2)
def test_ranks_collect_in_the_same_steps(clipping: float) -> None:
    config = make_config(gradient_clipping=clipping)
    with thresholds(*OFTEN):
        with built(make_model("mlp"), config) as engine:
            # Rank 1 makes four times as many objects: its collections would come in other steps.
            found = from_all_ranks(full_collections_of(engine, 200 * (1 + 3 * dist.get_rank())))
            assert gc.get_threshold() == (*OFTEN[:2], 2 * full_collections.EACH)
        assert gc.get_threshold() == OFTEN
    assert found[0] == found[1]
    apart = {b - a for a, b in zip(found[0], found[0][1:], strict=False)}
    assert len(found[0]) >= 3
    assert len(apart) == 1
    assert found[0][0] % apart.pop() == 0
