"""Unequal batches: who computes which samples, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engines import make_config
from support.models import make_model

import hytrain
from hytrain.config import BatchShares, HyTrainConfig
from hytrain.errors import ConfigError, UnsupportedError
from hytrain.optimizer.global_batch import loss_of, valid_labels
from hytrain.optimizer.unequal_batches import DealtSizes, UnequalBatchSampler

pairs = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), min_size=1, max_size=4).filter(
    lambda rows: sum(size for size, _ in rows) > 0
)


@given(pairs, st.integers(0, 30), st.booleans(), st.integers(0, 3))
def test_every_sample_of_whole_batches_is_dealt_once(
    rows: list[tuple[int, int]], rest: int, shuffle: bool, epoch: int
) -> None:
    shares = BatchShares(tuple(s for s, _ in rows), tuple(m for _, m in rows))
    batch = shares.global_batch
    steps, total = 3 + rest // batch, 3 * batch + rest
    dealt: list[list[int]] = [[] for _ in range(steps)]
    for rank, (size, most) in enumerate(rows):
        sampler = UnequalBatchSampler(total, shares, rank, shuffle=shuffle, seed=1)
        sampler.set_epoch(epoch)
        pieces = list(sampler)
        assert len(pieces) == len(sampler) == steps * len(shares.micro_batches(rank))
        assert all(0 < len(piece) <= most for piece in pieces)
        per_step = len(shares.micro_batches(rank))
        for number, piece in enumerate(pieces):
            dealt[number // per_step] += piece
        assert sum(map(len, pieces)) == steps * size
    flat = [index for one in dealt for index in one]
    assert len(set(flat)) == len(flat) == steps * batch
    # The samples of a global batch do not depend on the cut.
    whole = UnequalBatchSampler(total, BatchShares((batch,), (batch,)), 0, shuffle=shuffle, seed=1)
    whole.set_epoch(epoch)
    assert [sorted(one) for one in whole] == [sorted(one) for one in dealt]


def test_epochs_differ_and_repeat() -> None:
    sampler = UnequalBatchSampler(40, BatchShares((2, 2), (1, 2)), 0)
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


@pytest.mark.parametrize(
    ("sizes", "micro", "match"),
    [
        ((1, 2), (1,), "2 numbers"),
        ((0, 0), (1, 1), "not all 0"),
        ((-1, 2), (1, 1), "none below 0"),
        ((1, 2), (0, 1), "above 0"),
    ],
)
def test_impossible_shares(sizes: tuple[int, ...], micro: tuple[int, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        BatchShares(sizes, micro)


def test_a_small_dataset_and_a_foreign_rank() -> None:
    shares = BatchShares((3, 1), (1, 1))
    with pytest.raises(ConfigError, match="3 samples, a global batch 4"):
        UnequalBatchSampler(3, shares, 0)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        UnequalBatchSampler(30, shares, 2)


def section(**keys: Any) -> HyTrainConfig:
    found = HyTrainConfig.from_deepspeed({"hytrain": keys})
    assert found is not None
    return found


def test_micro_batches_default_to_the_whole_piece() -> None:
    assert section(batch_sizes=[3, 0]).batch_shares() == BatchShares((3, 0), (3, 1))
    assert section().batch_shares() is None
    with pytest.raises(ConfigError, match="needs"):
        section(micro_batch_sizes=[1]).batch_shares()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("keys", "top", "match"),
    [
        ({"batch_sizes": [1, 1]}, {}, "the job has 1 ranks"),
        ({"batch_sizes": [3]}, {"train_batch_size": 4}, "sums to 3"),
        ({"batch_sizes": [0]}, {}, "not all 0"),
    ],
)
def test_a_configuration_that_does_not_fit(
    keys: dict[str, Any], top: dict[str, Any], match: str
) -> None:
    model = make_model("mlp")
    with pytest.raises(ConfigError, match=match):
        hytrain.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=make_config(hytrain=keys, **top),
        )


def test_what_a_mean_is_over() -> None:
    labels = torch.tensor([[5, 6, -100, 7], [-100, -100, 1, 2]])
    assert int(valid_labels({"labels": labels})) == 4  # the first of each sample predicts nothing
    for batch in ({"x": labels}, {"labels": labels[0]}, (labels, labels)):
        with pytest.raises(UnsupportedError, match="num_valid"):
            valid_labels(batch)


def test_where_the_loss_is() -> None:
    loss = torch.tensor(2.0)
    for output in (loss, {"loss": loss}, (loss, 1), type("Output", (), {"loss": loss})()):
        assert loss_of(output) is loss
    for output in (torch.zeros(2), {}, (), object()):
        with pytest.raises(UnsupportedError, match="scalar loss"):
            loss_of(output)


# -- sizes that micro-batches have -------------------------------------------------------------


def _micro_batch(samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(samples, 3), "scale": torch.ones(())}


def test_micro_batches_as_they_were_dealt_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    dealt = DealtSizes(BatchShares((5, 2), (2, 2)), 0)
    given = [_micro_batch(size) for size in (2, 2, 1, 2, 2, 1)]
    data = iter(given)
    for first in (0, 3):
        came = list(dealt.watch(data))
        assert all(one is other for one, other in zip(came, given[first:], strict=False))
        assert len(came) == 3
    assert not caplog.records


@pytest.mark.parametrize("kind", [dict, tuple])
def test_warns_once_of_micro_batches_of_other_sizes(
    caplog: pytest.LogCaptureFixture, kind: type
) -> None:
    dealt = DealtSizes(BatchShares((5, 2), (2, 2)), 0)
    batches = [_micro_batch(size) for size in (2, 2, 2, 1, 1, 1)]
    data = iter(batches if kind is dict else [tuple(batch.values()) for batch in batches])
    assert len([*dealt.watch(data), *dealt.watch(data)]) == 6
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("rank 0: micro-batch 2 of a step has 2 samples")
    assert 'but "hytrain.batch_sizes" and "micro_batch_sizes", or the plan, say 1' in text


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.zeros(1, 8), "lengths": torch.zeros(4)},
        {"text": ["a", "b"]},
        torch.zeros(7, 2),
        object(),
    ],
    ids=["of several lengths", "no tensors", "a tensor", "anything"],
)
def test_what_has_no_number_of_samples_is_taken(
    caplog: pytest.LogCaptureFixture, batch: object
) -> None:
    dealt = DealtSizes(BatchShares((4,), (2,)), 0)
    assert all(one is batch for one in dealt.watch(iter([batch, batch])))
    assert not caplog.records


def test_data_that_ends_in_a_step_ends_there() -> None:
    dealt = DealtSizes(BatchShares((4,), (2,)), 0)
    assert len(list(dealt.watch(iter([_micro_batch(2)])))) == 1
    assert list(dealt.watch(iter(()))) == []
