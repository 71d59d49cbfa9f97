"""Checkpoints with moments in fewer bytes: another kind, or another seed, is said."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
from support.comparisons import assert_same_states
from support.resume import Run, engine_of, snapshot, train

from hytrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize(
    ("saved", "loaded", "words"),
    [
        ("fp32", "bf16", 'kept as "fp32"; "hytrain.moments" is "bf16" here'),
        ("fp32", "8bit", "converted to the nearest"),
        ("8bit", "fp32", "converted without loss"),
        ("bf16", "8bit", 'kept as "bf16"; "hytrain.moments" is "8bit" here'),
    ],
)
def test_another_kind_converts_and_says_so(
    saved: str, loaded: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(Run(moments=saved)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path)
        before = snapshot(engine)
    with engine_of(Run(moments=loaded).another()) as engine:
        with caplog.at_level(logging.WARNING, logger="hytrain"):
            engine.load_checkpoint(tmp_path)
        assert words in caplog.text
        now = snapshot(engine)
        for name, tensors in before.state.items():
            assert torch.equal(now.state[name]["fp32"], tensors["fp32"])
            for kind in ("exp_avg", "exp_avg_sq"):
                value, found = tensors[kind], now.state[name][kind]
                if loaded == "fp32":
                    assert torch.equal(found, value)
                else:
                    assert float((found - value).abs().max()) <= 0.07 * float(value.abs().max())
                    assert not torch.equal(found, value)
        train(engine, 3, 5)


def test_another_seed_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(Run(moments="8bit", moments_seed=5)) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
    for seed in (5, 0):
        assert "moments_seed" not in caplog.text
        run = Run(moments="8bit", moments_seed=seed).another()
        with engine_of(run) as engine, caplog.at_level(logging.WARNING, logger="hytrain"):
            engine.load_checkpoint(tmp_path)
    assert '"hytrain.moments_seed" 5, here it is 0' in caplog.text


@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_a_state_dict_is_loaded_into_the_same_kind_only(moments: str) -> None:
    with engine_of(Run(moments=moments)) as engine:
        train(engine, 0, 3)
        saved = copy.deepcopy(engine.optimizer.state_dict())
        expected = snapshot(engine)
        train(engine, 3, 5)
        engine.optimizer.load_state_dict(saved)
        assert_same_states(snapshot(engine).state, expected.state)
    with (
        engine_of(Run()) as engine,
        pytest.raises(CheckpointError, match=f'kept as "{moments}", here "hytrain.moments" is'),
    ):
        engine.optimizer.load_state_dict(saved)
