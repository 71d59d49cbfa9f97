"""Accumulation layer by layer on two to three ranks, with unequal batches and shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rank_batches
import rank_layer_major as cases
from harness import RankPools
from rank_batches import Shares

pytestmark = pytest.mark.timeout(240)

TWO = [
    Shares((3, 1), (1, 1), (0.5, 0.5), 2, 0.0, (0.0, 0.5), "layer_major"),
    Shares((2, 5), (1, 2), (0.7, 0.3), 2, 0.5, (1.0, 0.0), "layer_major", "offload"),
    Shares((5, 0), (2, 1), (0.3, 0.7), 1, 0.5, (0.5, 0.5), "layer_major"),
    Shares((0, 3), (1, 1), (0.5, 0.5), 2, 0.05, (0.0, 1.0), "layer_major"),
    Shares((3, 0), (1, 1), (0.3, 0.7), 3, 0.5, (0.0, 0.5), "layer_major"),
]
THREE = [
    Shares((1, 4, 2), (1, 3, 1), (0.2, 0.5, 0.3), 2, 0.5, (0.0, 0.5, 1.0), "layer_major"),
    Shares((0, 2, 3), (1, 1, 2), (0.6, 0.2, 0.2), 1, 0.05, (0.5, 0.0, 0.0), "layer_major"),
    Shares((0, 4, 0), (1, 2, 1), (0.2, 0.2, 0.6), 3, 0.05, (0.5, 0.0, 1.0), "layer_major"),
]


@pytest.mark.parametrize("case", [*TWO, *THREE], ids=str)
def test_the_same_as_one_micro_batch_after_another(ranks: RankPools, case: Shares) -> None:
    ranks(len(case.sizes)).run(cases.same_as_micro_batch_major, case)


@pytest.mark.parametrize("sizes", [(4, 2), (0, 3)], ids=str)
def test_zero_3_is_zero_2(ranks: RankPools, sizes: tuple[int, int]) -> None:
    case = Shares(sizes, (1, 1), (0.3, 0.7), 3, 0.05, (0.5, 0.0), "layer_major", "offload")
    ranks(2).run(cases.zero_3_is_zero_2, case)


@pytest.mark.parametrize("sizes", [(3, 1), (0, 2)], ids=str)
@pytest.mark.parametrize("kind", ["gpt2", "vit", "mlp", "borrowing"])
def test_zero_3_of_other_models(ranks: RankPools, kind: str, sizes: tuple[int, int]) -> None:
    ranks(2).run(cases.other_models, kind, sizes)


@pytest.mark.parametrize("case", [TWO[1], THREE[1]], ids=str)
def test_gradients_are_those_of_the_whole_batch(ranks: RankPools, case: Shares) -> None:
    ranks(len(case.sizes)).run(rank_batches.gradients_are_the_whole_batch, case)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("stubborn", [0, 1])
def test_a_rank_that_falls_back(ranks: RankPools, stubborn: int, step: int) -> None:
    case = replace(TWO[0], clipping=0.5)
    ranks(2).run(cases.one_rank_falls_back, case, stubborn, step)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2), (3, 0)], ids=str)
def test_zero_3_gathers_a_layer_once_a_pass(ranks: RankPools, sizes: tuple[int, int]) -> None:
    case = Shares(sizes, (1, 1), (0.7, 0.3), 3, 0.5, (0.0, 0.5), "layer_major")
    ranks(2).run(cases.one_gather_a_layer_and_pass, case)


@pytest.mark.parametrize(
    ("sizes", "kind", "is_short"),
    [
        ((4, 2), "at_the_end", False),
        ((3, 0), "in_backward", False),
        ((0, 2), "at_the_end", True),
        ((4, 2), "in_backward", True),
    ],
    ids=str,
)
def test_zero_3_falls_back_on_all_ranks(
    ranks: RankPools, sizes: tuple[int, int], kind: str, is_short: bool
) -> None:
    case = Shares(sizes, (1, 1), (0.7, 0.3), 3, 0.5, (0.0, 0.5), "layer_major")
    ranks(2).run(cases.all_ranks_fall_back, case, kind, is_short)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0)], ids=str)
def test_zero_3_with_a_layer_that_comes_late(ranks: RankPools, sizes: tuple[int, int]) -> None:
    ranks(2).run(cases.a_layer_comes_late, sizes)
