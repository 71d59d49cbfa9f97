"""A resumed run draws the batches that the uninterrupted one draws."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import make_config
from support.resume import GLOBAL_BATCH, Everything, micro_batch, train
from torch.utils.data import Dataset, RandomSampler

import hytrain

pytestmark = pytest.mark.usefixtures("process_group")

SAMPLES = 5 * GLOBAL_BATCH


class _Tokens(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, micro_batch(index)[0]


@contextmanager
def _built(*, shuffled: bool = False) -> Generator[tuple[Any, Any]]:
    # A loader's workers are forked. One ends if Python frees CUDA tensors in it, such as those of
    # an earlier test's engine.
    gc.collect()
    torch.manual_seed(0)
    model = Everything()
    config = make_config(train_micro_batch_size_per_gpu=GLOBAL_BATCH)
    engine, _, loader, _ = hytrain.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=_Tokens()
    )
    if shuffled:
        data = _Tokens()
        loader = engine.deepspeed_io(data, data_sampler=RandomSampler(data), num_local_io_workers=0)
        engine.training_dataloader = loader
    loaders = engine.training_dataloader, loader
    try:
        yield engine, loader
    finally:
        engine.destroy()
        # As any DeepSpeed engine's, the loader is in a reference cycle. Python's collector closes
        # the queues in one before torch tells the workers to end, and torch waits 5 s for each.
        for left in loaders:
            left.data = None


def _draw(engine: Any, batches: Any, number: int) -> list[list[int]]:
    """Trains on the next batches; the samples in each."""
    drawn: list[list[int]] = []
    for _ in range(number):
        indices, tokens = next(batches)
        engine.backward(engine(tokens))
        engine.step()
        drawn.append(indices.tolist())
    return drawn


@pytest.mark.parametrize("shuffled", [False, True], ids=["dealt out", "shuffled"])
@pytest.mark.parametrize("begun", [False, True], ids=["new pass", "begun before the load"])
def test_the_next_batches_are_the_same(shuffled: bool, begun: bool, tmp_path: Path) -> None:
    with _built(shuffled=shuffled) as (engine, loader):
        torch.manual_seed(5)
        _draw(engine, iter(loader), 5)  # a whole pass, left before it says that it is over
        batches = iter(loader)
        first = _draw(engine, batches, 2)
        engine.save_checkpoint(tmp_path)
        expected = _draw(engine, batches, 3)
        noise = torch.rand(())
        again = _draw(engine, iter(loader), 5)
    assert len({index for batch in first + expected for index in batch}) == SAMPLES

    with _built(shuffled=shuffled) as (engine, loader):
        torch.manual_seed(99)
        if begun:
            batches = iter(loader)
            next(batches)
        engine.load_checkpoint(tmp_path)
        if not begun:
            batches = iter(loader)
        assert _draw(engine, batches, 3) == expected
        assert torch.rand(()) == noise
        with pytest.raises(StopIteration):
            next(batches)
        assert _draw(engine, iter(loader), 5) == again


@pytest.mark.parametrize("begun", [False, True], ids=["new pass", "begun before the load"])
def test_between_two_passes(begun: bool, tmp_path: Path) -> None:
    with _built() as (engine, loader):
        list(loader)
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
        batches = iter(loader)
        expected = _draw(engine, batches, 2)
        engine.load_checkpoint(tmp_path)
        assert _draw(engine, batches if begun else iter(loader), 2) == expected


def test_a_save_behind_a_load_keeps_it(tmp_path: Path) -> None:
    """Before anything is drawn."""
    with _built(shuffled=True) as (engine, loader):
        batches = iter(loader)
        _draw(engine, batches, 2)
        engine.save_checkpoint(tmp_path, "drawn")
        expected = _draw(engine, batches, 3)
        engine.load_checkpoint(tmp_path, "drawn")
        engine.save_checkpoint(tmp_path, "loaded")
        engine.load_checkpoint(tmp_path, "loaded")
        assert _draw(engine, iter(loader), 3) == expected


def test_weights_alone_leave_it(tmp_path: Path) -> None:
    with _built() as (engine, loader):
        _draw(engine, iter(loader), 2)
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert len(_draw(engine, iter(loader), 5)) == 5
