"""What libraries and scripts use of DeepSpeed's surface, most of it in ZeRO-3, on 2 ranks."""

from __future__ import annotations

import pytest
import rank_surface as cases
from harness import RankPools

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("threshold", [0, 100])
def test_status_is_true(ranks: RankPools, threshold: int) -> None:
    ranks(2).run(cases.status_is_true, threshold)


@pytest.mark.parametrize("frozen", [False, True])
def test_shards_make_the_whole(ranks: RankPools, frozen: bool) -> None:
    ranks(2).run(cases.shards_make_the_whole, frozen)


def test_contexts_within_contexts(ranks: RankPools) -> None:
    ranks(2).run(cases.contexts_within_contexts)


def test_hooks_taken_off(ranks: RankPools) -> None:
    ranks(2).run(cases.hooks_taken_off)


def test_gathered_in_a_forward(ranks: RankPools) -> None:
    ranks(2).run(cases.gathered_in_a_forward)


def test_compiled_as_eager(ranks: RankPools) -> None:
    ranks(2).run(cases.compiled_as_eager)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_coalesced_is_the_sum(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.coalesced_is_the_sum, stage)


def test_leaf_modules(ranks: RankPools) -> None:
    ranks(2).run(cases.leaf_modules)
