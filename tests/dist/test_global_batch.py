"""Unequal batches on two to four ranks: the gradients of one process with the whole batch."""

from __future__ import annotations

import pytest
import rank_batches as cases
import rank_matrix as matrix
from harness import RankPools
from rank_batches import Shares
from support.covering import covering, every

pytestmark = pytest.mark.timeout(240)

TWO = [
    Shares((3, 1), (2, 1), (0.5, 0.5), 2, 0.0, (0.0, 0.5)),
    Shares((1, 4), (1, 1), (0.7, 0.3), 2, 0.5, (1.0, 0.0)),
    Shares((5, 0), (2, 1), (0.3, 0.7), 1, 0.5, (0.5, 0.5)),
    Shares((0, 3), (1, 3), (0.5, 0.5), 2, 0.05, (0.0, 1.0)),
    Shares((1, 4), (1, 1), (0.7, 0.3), 3, 0.5, (1.0, 0.0)),
    Shares((5, 0), (2, 1), (0.3, 0.7), 3, 0.5, (0.5, 0.5)),
]
THREE = [
    Shares((1, 4, 2), (1, 3, 1), (0.2, 0.5, 0.3), 2, 0.5, (0.0, 0.5, 1.0)),
    Shares((0, 2, 3), (1, 1, 2), (0.6, 0.2, 0.2), 1, 0.05, (0.5, 0.0, 0.0)),
    Shares((3, 0, 2), (1, 1, 2), (0.2, 0.5, 0.3), 3, 0.05, (0.5, 0.0, 1.0)),
]

# Ordered by ranks: with a GPU only one pool of them is alive at a time.
MATRIX = sorted((matrix.Case(**v) for v in covering(matrix.VALUES)), key=lambda case: case.ranks)
MATRIX_FULL = sorted((matrix.Case(**v) for v in every(matrix.VALUES)), key=lambda case: case.ranks)


@pytest.mark.parametrize("case", [*TWO, *THREE], ids=str)
def test_training_is_that_of_one_process(ranks: RankPools, case: Shares) -> None:
    ranks(len(case.sizes)).run(cases.train_and_compare, case)


@pytest.mark.parametrize("case", [*TWO, *THREE], ids=str)
def test_gradients_are_those_of_the_whole_batch(ranks: RankPools, case: Shares) -> None:
    ranks(len(case.sizes)).run(cases.gradients_are_the_whole_batch, case)


@pytest.mark.parametrize("k", [0.0, 0.5])
@pytest.mark.parametrize("sizes", [(2, 4), (2, 0)], ids=str)
@pytest.mark.parametrize("gathers", ["kept", "defaults"])
def test_layers_that_stay_for_the_next_pass(
    ranks: RankPools, gathers: str, sizes: tuple[int, int], k: float
) -> None:
    """With DeepSpeed's own keys of ZeRO-3: a rank with fewer micro-batches follows alone."""
    case = Shares(sizes, (2, 2), (0.5, 0.5), 3, 0.5, (k, k), gathers=gathers)
    ranks(2).run(cases.train_and_compare, case)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", ["micro_batch_major", "layer_major"])
def test_gradients_left_by_hand(ranks: RankPools, stage: int, accumulation: str) -> None:
    ranks(2).run(cases.what_was_left_by_hand_is_averaged, stage, accumulation)


def test_a_mean_over_nobody_knows_what_is_refused(ranks: RankPools) -> None:
    ranks(2).run(cases.refuses_what_it_cannot_weigh)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_pair_of_differences(ranks: RankPools, case: matrix.Case) -> None:
    ranks(case.ranks).run(matrix.trains_as_one_process, case)


@pytest.mark.parity_full
@pytest.mark.parametrize("case", MATRIX_FULL, ids=str)
def test_every_combination(ranks: RankPools, case: matrix.Case) -> None:
    ranks(case.ranks).run(matrix.trains_as_one_process, case)


@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_without_samples_updates_on_its_gpu(ranks: RankPools, idle: int) -> None:
    results = ranks(2).run(matrix.an_idle_rank_is_placed, idle)
    seen, reason = results[idle]
    assert seen[0] == 0
    assert seen[-1] == 6
    assert "computes no samples" in reason
    assert results[1 - idle][0] == [0] * len(seen)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_without_samples_has_one_gradient_of_zeros(ranks: RankPools, stage: int) -> None:
    busy, idle = ranks(2).run(matrix.gradients_that_are_zero, 1, stage)
    layers = busy[0]
    assert busy == [layers, layers, layers]
    assert idle == [layers, layers, 1]
