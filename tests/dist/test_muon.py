"""Muon on several ranks: checkpoints that change ranks and stage, and more ranks than matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from harness import RankPools
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model

MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}


def steps(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        own = number * dist.get_world_size() + dist.get_rank()
        engine.backward(loss_of(engine(**make_batch("mlp", own))))
        engine.step()


def save(folder: str, stage: int) -> Any:
    config = make_config(stage=stage, optimizer=MUON)
    with built(make_model("mlp"), config) as engine:
        steps(engine, 0, 3)
        engine.save_checkpoint(folder, "three")
        return engine.fp32_state_dict()


def load(folder: str, stage: int) -> Any:
    config = make_config(stage=stage, gpu_fraction=0.5, optimizer=MUON)
    with built(make_model("mlp", seed=1), config) as engine:
        engine.load_checkpoint(folder, "three")
        found = engine.fp32_state_dict()
        steps(engine, 3, 4)
        return found


def test_checkpoints_change_ranks_and_stage(ranks: RankPools, tmp_path: Path) -> None:
    saved, *_ = ranks(2).run(save, str(tmp_path), 2)
    assert set(saved["blocks.0.up.weight"]) == {"fp32", "momentum_buffer"}
    for count, stage in ((1, 1), (3, 3)):
        loaded, *_ = ranks(count).run(load, str(tmp_path), stage)
        assert_same_states(loaded, saved)


def few_matrices() -> list[int]:
    """Two matrices for three ranks: one of them owns padding alone."""
    model = make_model("mlp")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in ("blocks.0.up.weight", "blocks.3.down.weight"))
    with built(model, make_config(optimizer=MUON, gpu_fraction=0.5)) as engine:
        before = [state.read_master(0, state.shard_size).clone() for state in _states(engine)]
        steps(engine, 0, 3)
        engine.optimizer.flush()
        pairs = zip(_states(engine), before, strict=True)
        return [int(state.read_master(0, state.shard_size).ne(old).sum()) for state, old in pairs]


def _states(engine: Any) -> Any:
    return engine.optimizer.layer_states


def test_more_ranks_than_matrices(ranks: RankPools) -> None:
    changed = ranks(3).run(few_matrices)
    by_layer = list(zip(*changed, strict=True))
    assert [sorted(counts)[:2] for counts in by_layer] == [[0, 0], [0, 0]]
    assert all(max(counts) > 900 for counts in by_layer)
