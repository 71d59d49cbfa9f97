"""Two ranks between phases: offload_states(), and random numbers after a resume."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from support.engines import from_all_ranks
from support.resume import Run, assert_same, engine_of, snapshot, train
from torch import nn

from hytrain.errors import StatesOffloadedError

pytestmark = pytest.mark.timeout(240)

MICRO_BATCHES = 6

RUNS = [
    Run(stage=1, fractions=(0.5, 0.5), gpu_fraction=0.5),
    Run(stage=2, fractions=(0.7, 0.3), gpu_fraction=1.0, accumulation=2, groups=True),
    Run(stage=3, fractions=(0.3, 0.7), gpu_fraction=0.5, accumulation=2),
    Run(stage=3, fractions=(0.5, 0.5), gpu_fraction=0.0, clipping=0.0, check_overflow=False),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
@on_ranks(2)
def test_states_leave_and_come_back(run: Run) -> None:
    """Between micro-batches, in whichever set; ranks end where they end without it."""
    with engine_of(run) as engine:
        straight = train(engine, 0, MICRO_BATCHES)
        expected = snapshot(engine)
    with engine_of(run) as engine:
        losses: list[float] = []
        for number in range(MICRO_BATCHES):
            include = [None, ["lp_params"], ["optim_states", "lp_grads"]][number % 3]
            losses += train(engine, number, number + 1)
            engine.offload_states(include=include, non_blocking=number % 2 == 0)
            with pytest.raises(StatesOffloadedError):
                train(engine, number, number + 1)
            if run.stage == 3:
                for parameter in engine.module.parameters():
                    assert parameter.ds_tensor.device.type == "cpu"
            engine.reload_states(non_blocking=number % 2 == 1)
        assert losses == straight
        assert_same(snapshot(engine), expected)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_dropout_goes_on_on_each_rank(stage: int, tmp_path: Path) -> None:
    """With its own random numbers."""
    run = Run(stage=stage)

    def add_dropout(engine: object) -> None:
        def drop(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(output, 0.2, training=True)

        engine.module.norm.register_forward_hook(drop)  # pyright: ignore

    def seed(number: int) -> None:
        torch.manual_seed(10 * number + dist.get_rank())
        random.seed(10 * number + dist.get_rank())

    with engine_of(run) as engine:
        add_dropout(engine)
        seed(1)
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 2, 4)
        expected = snapshot(engine)
        drawn = [random.random(), float(torch.rand(()))]
    with engine_of(run.another()) as engine:
        add_dropout(engine)
        seed(2)
        engine.load_checkpoint(tmp_path)
        assert train(engine, 2, 4) == losses
        assert_same(snapshot(engine), expected)
        assert [random.random(), float(torch.rand(()))] == drawn
    first, second = from_all_ranks(drawn)
    assert first != second
