"""Order, sharing out and position of the training sequences."""

from __future__ import annotations

import data
import numpy as np
import pytest
import torch
from corpus import Corpus

SEQ_LEN = 8


def _sequences(
    num_sequences: int = 100, *, seed: int = 0, seq_len: int = SEQ_LEN, digest: str = "d"
) -> data.PackedSequences:
    # Token t of the corpus is t itself, so a row tells which sequence it is.
    tokens = np.arange(num_sequences * SEQ_LEN + 3, dtype=np.uint32)
    return data.PackedSequences(Corpus(tokens, digest), seq_len=seq_len, seed=seed)


def _numbers(batch: torch.Tensor) -> list[int]:
    assert batch.dtype == torch.int64
    starts = batch[:, :1]
    assert torch.equal(batch, starts + torch.arange(batch.shape[1])), "a row is one sequence"
    return (starts.flatten() // SEQ_LEN).tolist()


def test_an_epoch_visits_every_training_sequence_once() -> None:
    sequences = _sequences()
    assert (sequences.num_train, sequences.num_held_out) == (98, 2)
    held_out = _numbers(sequences.held_out_batch(0, 2))
    epoch = _numbers(sequences.train_batch(0, 98))
    assert sorted(epoch + held_out) == list(range(100))
    assert epoch != sorted(epoch)


def test_epochs_differ_and_join() -> None:
    sequences = _sequences()
    first, second = (_numbers(sequences.train_batch(i * 98, 98)) for i in range(2))
    assert first != second
    assert sorted(first) == sorted(second)
    across = _numbers(sequences.train_batch(96, 4))
    assert across == first[-2:] + second[:2]


def test_order_depends_on_the_seed_alone() -> None:
    one, same, other = _sequences(seed=1), _sequences(seed=1), _sequences(seed=2)
    same.train_batch(500, 3)
    assert torch.equal(one.train_batch(7, 20), same.train_batch(7, 20))
    assert not torch.equal(one.train_batch(7, 20), other.train_batch(7, 20))


def test_order_is_frozen() -> None:
    """A checkpoint of an older version must find its place: these numbers may never change."""
    assert _numbers(_sequences(seed=5).train_batch(0, 6)) == [11, 31, 54, 97, 42, 99]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_has_the_same_sequences_on_any_number_of_ranks(world_size: int) -> None:
    sequences = _sequences()
    plan = data.BatchPlan(micro_batch=2, accumulation=8 // world_size, world_size=world_size)
    assert plan.global_batch == 16
    seen = [
        number
        for micro_step in range(plan.accumulation)
        for rank in range(world_size)
        for number in _numbers(sequences.train_batch(plan.first(32, micro_step, rank), 2))
    ]
    assert sorted(seen) == sorted(_numbers(sequences.train_batch(32, 16)))


def test_position_returns_to_the_same_place() -> None:
    sequences = _sequences(seed=4)
    state = sequences.position(48).state()
    resumed = _sequences(seed=4)
    consumed = resumed.consumed_at(state)
    assert consumed == 48
    assert torch.equal(resumed.train_batch(consumed, 8), sequences.train_batch(48, 8))


@pytest.mark.parametrize(
    ("change", "option"),
    [({"seed": 5}, "--seed"), ({"seq_len": 4}, "--seq-len"), ({"digest": "e"}, "--data")],
)
def test_position_of_other_data_is_refused(change: dict[str, int], option: str) -> None:
    state = _sequences(seed=4).position(48).state()
    other = _sequences(**{"seed": 4, **change})
    with pytest.raises(data.DataError, match=option):
        other.consumed_at(state)


def test_held_out_wraps_around() -> None:
    sequences = _sequences()
    numbers = _numbers(sequences.held_out_batch(0, 5))
    assert numbers == [numbers[0], numbers[1], numbers[0], numbers[1], numbers[0]]


def test_smallest_corpus() -> None:
    sequences = _sequences(2)
    assert (sequences.num_train, sequences.num_held_out) == (1, 1)
    with pytest.raises(data.DataError, match="1 sequences of --seq-len 8"):
        _sequences(1)


def test_seed_range() -> None:
    with pytest.raises(data.DataError, match="--seed"):
        _sequences(seed=-1)


def test_every_rank_evaluates_as_often() -> None:
    plan = data.BatchPlan(micro_batch=4, accumulation=1, world_size=2)
    assert data.evaluation_rounds(32, plan) == 4
    assert data.evaluation_rounds(1, plan) == 1


def test_a_plan_deals_every_sequence_once() -> None:
    plan = data.BatchPlan(
        micro_batch=1, accumulation=1, world_size=3, sizes=(5, 0, 2), micro_sizes=(2, 0, 2)
    )
    assert plan.global_batch == 7
    assert plan.pieces(14, 0) == [(14, 2), (16, 2), (18, 1)]
    assert plan.pieces(14, 1) == []
    assert plan.pieces(14, 2) == [(19, 2)]
    equal = data.BatchPlan(micro_batch=2, accumulation=2, world_size=2)
    assert equal.pieces(8, 1) == [(10, 2), (14, 2)]
