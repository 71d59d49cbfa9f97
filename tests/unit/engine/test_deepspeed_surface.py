"""Calls and keys of DeepSpeed's that scripts use, and that hytrain's engine honours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import safe_get_full_optimizer_state
from support.comparisons import assert_same_bits, assert_same_states
from support.engines import built, make_config
from support.models import Mlp, make_batch, make_model

import hytrain
from hytrain.errors import CheckpointError, ConfigError, UnusedParametersError


def _step(engine: Any, number: int = 0) -> None:
    engine.backward(engine(**make_batch("mlp", number)))
    engine.step()


def test_a_client_adds_to_the_universal_info(tmp_path: Path) -> None:
    patterns = {"vocabulary_parameter_patterns": ["embed.*"], "universal_checkpoint_version": 0.1}
    with built(make_model("mlp"), make_config()) as engine:
        _step(engine)
        client = {"universal_checkpoint_info": patterns, "epoch": 3}
        engine.save_checkpoint(tmp_path, client_state=client)
        _, found = engine.load_checkpoint(tmp_path)
        assert found is not None
        assert found["epoch"] == 3
        assert found["universal_checkpoint_info"] == {
            **patterns,
            "universal_checkpoint_version": 0.4,  # this is what was written
        }
        with pytest.raises(CheckpointError, match=r"universal_checkpoint_info.*give a dict"):
            engine.save_checkpoint(tmp_path, client_state={"universal_checkpoint_info": 1})


def test_load_universal_is_what_happens(tmp_path: Path) -> None:
    config = make_config(checkpoint={"load_universal": True})
    with built(make_model("mlp"), config) as engine:
        _step(engine)
        engine.save_checkpoint(tmp_path)
        saved = engine.fp32_state_dict()
        _step(engine)
        engine.load_checkpoint(tmp_path)
        assert_same_states(engine.fp32_state_dict(), saved)


def test_immediate_gradient_updates_are_what_happens() -> None:
    config = make_config()
    config["bf16"]["immediate_grad_update"] = True
    with built(make_model("mlp"), config) as engine:
        _step(engine)
        assert engine.global_steps == 1


@pytest.mark.parametrize("forced", [True, False, None])
def test_a_torch_adam_where_deepspeeds_is_forced(forced: bool | None) -> None:
    """DeepSpeed's default is to force its own, of which hytrain has no need."""
    model = make_model("mlp")
    config = make_config(optimizer=None, zero_force_ds_cpu_optimizer=forced)
    optimizer = torch.optim.Adam(model.parameters())
    if forced:
        for error in (ConfigError, ZeRORuntimeException):
            with pytest.raises(error, match="zero_force_ds_cpu_optimizer"):
                hytrain.initialize(model=model, optimizer=optimizer, config=config)
        return
    with built(model, config, optimizer=optimizer) as engine:
        _step(engine)
        assert engine.global_steps == 1


class _Unused(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters_that_are_not_ignored(stage: int) -> None:
    for model, is_refused in ((_Unused(), True), (Mlp(), False)):
        config = make_config(stage=stage)
        config["zero_optimization"]["ignore_unused_parameters"] = False
        with built(model, config) as engine:
            before = engine.fp32_state_dict()
            if is_refused:
                with pytest.raises(UnusedParametersError, match=r"extra\.weight.*ignore_unused"):
                    _step(engine)
                engine.zero_grad()
                assert_same_states(engine.fp32_state_dict(), before)
            else:
                _step(engine)


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_state_of_a_parameter(gpu_fraction: float) -> None:
    model = make_model("mlp")
    model.head.bias.requires_grad_(False)
    with built(model, make_config(gpu_fraction=gpu_fraction)) as engine:
        state = engine.optimizer.state
        assert len(state) == len(list(model.parameters())) - 1
        assert not state[model.head.bias]
        for number in range(3):
            _step(engine, number)
            for parameter, values in state.items():
                assert values["step"] == number + 1
                for kind in ("exp_avg", "exp_avg_sq"):
                    expected = safe_get_full_optimizer_state(parameter, kind)
                    assert_same_bits(kind, values[kind], expected)
        state[model.embed.weight]["exp_avg"].zero_()
        assert not safe_get_full_optimizer_state(model.embed.weight, "exp_avg").any()
        values = state[model.embed.weight]
        values["exp_avg"] = torch.full_like(values["exp_avg"], 2.0)
        assert (safe_get_full_optimizer_state(model.embed.weight, "exp_avg") == 2.0).all()
        with pytest.raises(KeyError):
            values["fp32"]
        with pytest.raises(ConfigError, match=r"'step'\] is 3 and cannot be set"):
            values["step"] = torch.tensor(4.0)
        with pytest.raises(ConfigError, match="has shape"):
            values["exp_avg"] = torch.zeros(1)
        with pytest.raises(ConfigError, match="cannot be deleted"):
            del values["exp_avg"]


def test_state_that_is_put_back_is_the_same() -> None:
    """As Lightning does at the end of a fit, to give the state to the host."""
    section = {"moments": "8bit"}
    with built(make_model("mlp"), make_config(gpu_fraction=0.5, hytrain=section)) as engine:
        _step(engine)
        before = engine.fp32_state_dict()
        for values in engine.optimizer.state.values():
            for key, value in values.items():
                values[key] = value.cpu()
        assert_same_states(engine.fp32_state_dict(), before)
