"""What plain DeepSpeed has saved on two ranks loads here, and ours there: ZeRO-1, 2 and 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from support.comparisons import assert_same_states
from support.plain_deepspeed import plain_engine, plain_state
from support.resume import WARMUP, Everything, Run, engine_of, micro_batch, snapshot, train

STAGES = [pytest.param(1, marks=pytest.mark.parity_full), 2, 3]


def _plain(stage: int, *, universal: bool) -> Any:
    torch.manual_seed(0)
    return plain_engine(
        Everything(),
        stage,
        train_micro_batch_size_per_gpu=micro_batch(0).shape[0] // dist.get_world_size(),
        gradient_clipping=0.5,
        scheduler=WARMUP,
        checkpoint={"load_universal": universal},
    )


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_of_plain_deepspeed(stage: int, tmp_path: Path) -> None:
    plain = _plain(stage, universal=False)
    train(plain, 0, 3)
    plain.save_checkpoint(str(tmp_path))
    state = plain_state(plain)
    plain.destroy()
    # Other shards, another stage, another placement; and weights that are not trained.
    for run in (Run(bf16=False, fractions=(0.7, 0.3)), Run(bf16=False, stage=3)):
        with engine_of(run.another()) as engine:
            path, _ = engine.load_checkpoint(tmp_path)
            assert Path(path).parent.name == "global_step3_universal"
            assert engine.global_steps == 3
            now = engine.fp32_state_dict()
            if dist.get_rank() == 0:
                assert_same_states(now, state)
            assert engine.optimizer.steps == [3]
            with engine.gathered_parameters():
                torch.manual_seed(0)
                frozen = Everything().frozen.weight
                assert torch.equal(engine.module.frozen.weight.cpu(), frozen)
            train(engine, 3, 4)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_in_plain_deepspeed(stage: int, tmp_path: Path) -> None:
    with engine_of(Run(bf16=False, fractions=(0.6, 0.4), stage=stage)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
    plain = _plain(stage, universal=True)
    train(plain, 7, 8)
    path, _ = plain.load_checkpoint(str(tmp_path))
    assert path is not None
    assert plain.global_steps == 3
    found = plain_state(plain)
    if dist.get_rank() == 0:
        assert_same_states(found, saved.state)
    train(plain, 3, 4)
    plain.destroy()
