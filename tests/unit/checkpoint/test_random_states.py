"""A resumed run draws the random numbers that the uninterrupted one draws."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import built, make_config
from support.resume import GLOBAL_BATCH, Everything, assert_same, micro_batch, snapshot, train
from torch import nn

from hytrain.checkpoint.save_contents import restore_random_states

pytestmark = pytest.mark.usefixtures("process_group")


class Dropping(Everything):
    """Draws from every generator in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        noise = random.random() + float(np.random.rand())
        x = self.dropout(self.embed(tokens))
        return super().forward(tokens) * (1 + 0.1 * noise) + 0.1 * x.float().pow(2).mean()


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _engine(**hytrain: Any) -> Any:
    torch.manual_seed(0)
    config = make_config(
        gpu_fraction=0.5, hytrain=hytrain, train_micro_batch_size_per_gpu=GLOBAL_BATCH
    )
    return built(Dropping(), config)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside"])
def test_dropout_goes_on(asynchronous: bool, tmp_path: Path) -> None:
    section = {"checkpoint": {"async": asynchronous}}
    with _engine(**section) as engine:
        _seed(1)
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 3, 6)
        expected = snapshot(engine)
        assert torch.rand(()) != torch.rand(())
        drawn = random.random(), float(np.random.rand())
    with _engine(**section) as engine:
        _seed(2)
        engine.load_checkpoint(tmp_path)
        assert train(engine, 3, 6) == losses
        assert_same(snapshot(engine), expected)
        assert (random.random(), float(np.random.rand())) == drawn
    with _engine(**section) as engine:  # the test sees it
        _seed(2)
        engine.load_checkpoint(tmp_path)
        _seed(2)
        assert train(engine, 3, 6) != losses


@pytest.mark.parametrize("only", ["load_module_only", "load_optimizer_states"])
def test_a_new_training_has_its_own_numbers(only: str, tmp_path: Path) -> None:
    with _engine() as engine:
        _seed(1)
        engine(micro_batch(0))
        engine.save_checkpoint(tmp_path)
        _seed(2)
        before = torch.get_rng_state(), random.getstate()
        engine.load_checkpoint(tmp_path, **{only: only == "load_module_only"})
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]


class _Ranks:
    rank = 0
    world_size = 3


def test_other_numbers_of_ranks_are_said(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_rng_state()
    ranks: Any = _Ranks()
    with caplog.at_level(logging.INFO):
        restore_random_states([{}, {}], torch.device("cpu"), ranks)
        restore_random_states(None, torch.device("cpu"), ranks)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (record.message for record in caplog.records)
    assert "generators of 2 ranks and this job has 3: they are not restored" in first
    assert second == "the checkpoint has no states of random number generators"
