"""Weights read outside of their modules: in forwards under ZeRO-3, and right after a step."""

from __future__ import annotations

from functools import partial

import pytest
import rank_reads as cases
from harness import RankPools

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("kind", cases.MODELS)
def test_as_stage_2(ranks: RankPools, kind: str) -> None:
    ranks(2).run(cases.as_stage_2, kind, "each", 1)


@pytest.mark.parametrize("kind", ["penalty", "product-later", "short", "pairs", "block-later"])
def test_with_deepspeeds_keys_and_accumulation(ranks: RankPools, kind: str) -> None:
    ranks(2).run(cases.as_stage_2, kind, "kept", 2)


@pytest.mark.parametrize("gathers", ["each", "kept"])
@pytest.mark.parametrize("kind", ["penalty", "transposed", "block"])
def test_passes_that_go_past_the_engine(ranks: RankPools, kind: str, gathers: str) -> None:
    ranks(2).run(partial(cases.as_stage_2, past=True), kind, gathers, 1)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("gathers", ["each", "kept"])
@pytest.mark.parametrize("kind", ["penalty", "linear-later", "short", "unnoticed", "penalized"])
def test_one_rank_with_its_weights_on_the_host(kind: str, gathers: str) -> None:
    cases.as_stage_2(kind, gathers, 1, offload_param={"device": "cpu"})


@pytest.mark.parametrize("kind", ["pairs", "product"])
def test_layers_that_are_whole_at_once(ranks: RankPools, kind: str) -> None:
    """Those that are gathered ahead, and the one that is read outside of its module."""
    assert ranks(2).run(cases.most_live, kind) == [2 + (kind == "product")] * 2


def test_what_an_extension_reads_of_nothing(ranks: RankPools) -> None:
    ranks(2).run(cases.unnoticed_when_away)


def test_outside_of_passes(ranks: RankPools) -> None:
    ranks(2).run(cases.outside_of_passes)


@pytest.mark.parametrize("what", cases.AFTER_STEP)
@pytest.mark.parametrize("stage", [1, 2])
def test_after_a_step(ranks: RankPools, what: str, stage: int) -> None:
    ranks(2).run(cases.read_after_step, what, stage, False)


@pytest.mark.parametrize("what", cases.AFTER_STEP)
def test_weights_that_stay_on_every_rank(ranks: RankPools, what: str) -> None:
    ranks(2).run(cases.read_after_step, what, 3, True)


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_alone_reads_after_a_step(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.one_rank_reads, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_after_the_engine_has_gone(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.kept_after_destroy, stage)
