"""What a script does between two steps, beside torch: on two ranks, and streamed on one."""

from __future__ import annotations

from functools import partial

import pytest
import rank_between as cases
from harness import RankPools

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("way", ["grad", "eval", "frozen"])
def test_input_gradients(ranks: RankPools, way: str, forwards: int, stage: int) -> None:
    ranks(2).run(cases.input_gradients, way, forwards, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_numbers_of_forwards(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.numbers_of_forwards, stage)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_second_order(ranks: RankPools, stage: int, is_normed: bool) -> None:
    ranks(2).run(partial(cases.second_order, is_normed=is_normed), stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_late_hooks(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.late_hooks, stage)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("number", [2, 3])
def test_towers(ranks: RankPools, number: int, stage: int) -> None:
    ranks(number).run(cases.towers, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_tiles(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.tiles, stage, (3, 3, 2, 3))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("streams", [False, True])
def test_one_rank(streams: bool) -> None:
    stage, zero = (3, {"offload_param": {"device": "cpu"}}) if streams else (2, {})
    for way in ("grad", "frozen"):
        cases.input_gradients(way, 2, stage, **zero)
    cases.second_order(stage, is_normed=True, **zero)
    cases.tiles(stage, (1, 2, 4, 3, 4), **zero)
    cases.late_hooks(stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_sequence_group(ranks: RankPools, stage: int) -> None:
    ranks(2).run(cases.sequence_group, stage)
