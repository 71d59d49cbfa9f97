"""Two ranks: bitwise the serial update of each rank's shards, equal weights everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_training as cases
from harness import RankError, RankPool, RankPools

pytestmark = pytest.mark.timeout(240)

SHARDS = [(0.5, 0.5), (0.7, 0.3)]
shards = pytest.mark.parametrize("fractions", SHARDS, ids=str)
stages = pytest.mark.parametrize("stage", [1, 2, 3])
whole_weights = pytest.mark.parametrize("stage", [1, 2])


@shards
@stages
def test_reduced_gradients(ranks: RankPools, fractions: tuple[float, ...], stage: int) -> None:
    ranks(2).run(cases.reduced_gradients_are_the_mean, fractions, stage)


@shards
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("poisoned", [0, 1])
def test_overflow_on_one_rank_skips_on_both(
    ranks: RankPools, fractions: tuple[float, ...], gpu_fraction: float, poisoned: int
) -> None:
    ranks(2).run(cases.overflow_on_one_rank, fractions, gpu_fraction, poisoned)


@shards
@whole_weights
@pytest.mark.parametrize("first_step", [True, False])
def test_a_layer_unused_on_one_rank(
    ranks: RankPools, fractions: tuple[float, ...], first_step: bool, stage: int
) -> None:
    ranks(2).run(cases.layer_unused_on_one_rank, fractions, first_step, stage)


@shards
@whole_weights
@pytest.mark.parametrize("idle_steps", [[0, 1], [2, 3, 5]], ids=["first", "later"])
def test_a_rank_without_a_backward(
    ranks: RankPools, fractions: tuple[float, ...], stage: int, idle_steps: list[int]
) -> None:
    ranks(2).run(cases.no_backward_on_one_rank, fractions, stage, idle_steps)


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_an_evaluation_on_one_rank_only(ranks: RankPools, gpu_fraction: float) -> None:
    ranks(2).run(cases.withdraw_on_one_rank, (0.7, 0.3), gpu_fraction)


def test_a_late_gradient_ends_the_job(ranks: RankPools) -> None:
    ranks(2).run(cases.late_gradient, (0.7, 0.3))


@stages
@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_backward_passes_in_a_step(ranks: RankPools, stage: int, accumulation: int) -> None:
    ranks(2).run(cases.two_backward_passes, (0.7, 0.3), stage, accumulation)


@pytest.mark.parametrize("clipping", [1e-3, 100.0])
def test_gradients_summed_instead_of_averaged(ranks: RankPools, clipping: float) -> None:
    ranks(2).run(cases.gradients_are_summed, (0.7, 0.3), clipping)


def test_no_sync(ranks: RankPools) -> None:
    ranks(2).run(cases.no_sync, (0.7, 0.3))


def test_a_wrong_number_of_fractions(ranks: RankPools) -> None:
    for message in ranks(2).run(cases.number_of_fractions_is_wrong):
        assert '"hytrain.shard_fractions" has 3 numbers but the job has 2 ranks' in message


def test_a_killed_rank_does_not_leave_the_other_hanging(tmp_path: Path) -> None:
    report = tmp_path / "seconds"
    with (
        RankPool(2) as pool,
        pytest.raises(RankError, match="rank 1 died with exit code -9"),
    ):
        pool.run(cases.train_until_killed, 1, str(report))
    # The survivor raised by itself, before the group's timeout of 60 s, and closed its engine.
    assert float(report.read_text()) < 60.0
