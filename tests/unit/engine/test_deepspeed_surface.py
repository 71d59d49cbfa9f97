"""Calls and keys of DeepSpeed's that scripts use, and that hytrain's engine honours."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.utils import ZeRORuntimeException
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from support.comparisons import assert_same_bits, assert_same_states
from support.covering import everyday
from support.engines import built, environment, make_config
from support.models import Mlp, make_batch, make_model
from training import FRACTIONS, backward, followed, inputs

import hytrain
from hytrain.errors import CheckpointError, ConfigError, UnusedParametersError

# -- calls and keys of DeepSpeed's that scripts use, and that hytrain's engine honours ---------


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
        with pytest.raises(ConfigError, match=r"'step'\] cannot be written"):
            values["step"] = torch.tensor(4.0)
        with pytest.raises(ConfigError, match=r"'step'\] cannot be written"):
            values["step"].zero_()
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


# -- deepspeed.utils.safe_get_* and safe_set_* on one rank; several are in tests/dist ----------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_gradients_so_far_are_read_and_written(gpu_fraction: float, stage: int) -> None:
    def assert_read(expected: dict[str, torch.Tensor]) -> None:
        for name, wanted in expected.items():
            found = safe_get_full_grad(named[name])
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-7)

    config = {"gpu_fraction": gpu_fraction, "stage": stage, "accumulation": 2}
    with followed(make_model("mlp"), **config) as run:
        engine, named = run.engine, dict(run.engine.module.named_parameters())
        for step in range(4):
            with pytest.raises(ConfigError, match="reading a gradient, but there is none"):
                safe_get_full_grad(named["head.bias"])
            batches = [inputs(2 * step), inputs(2 * step + 1)]
            first = run.twin.gradients(engine, batches[:1], 0.5)
            expected = run.twin.gradients(engine, batches, 0.5)
            backward(engine, 2 * step)
            assert_read(first)
            early = torch.full_like(first["embed.weight"], 0.03)
            safe_set_full_grad(named["embed.weight"], early)
            expected["embed.weight"] = expected["embed.weight"] - first["embed.weight"] + early
            engine.step()
            backward(engine, 2 * step + 1)
            if step != 2:
                assert_read(expected)
            for name in ("blocks.1.up.weight", "head.bias"):
                expected[name] = safe_get_full_grad(named[name]).cpu() * 2
                safe_set_full_grad(named[name], expected[name])
            run.shadow.step()
            run.twin.assert_were_reduced(run.shadow, expected)


def test_what_cannot_be_said() -> None:
    model = Mlp()
    model.head.bias.requires_grad_(False)
    with built(model, make_config()) as engine:
        trained, frozen = model.head.weight, model.head.bias
        assert safe_get_full_fp32_param(frozen) is None
        assert safe_get_full_grad(frozen) is None
        with pytest.raises(ConfigError, match='no optimizer state "momentum": pass "exp_avg"'):
            safe_get_full_optimizer_state(trained, "momentum")
        with pytest.raises(ConfigError, match="the value has 3 elements"):
            safe_set_full_fp32_param(trained, torch.ones(3))
        with pytest.raises(ConfigError, match="writing a gradient, but there is none"):
            safe_set_full_grad(trained, torch.ones_like(trained))
        found: list[Exception] = []

        def hook(_gradient: torch.Tensor) -> None:
            try:
                safe_get_full_fp32_param(trained)
            except ConfigError as error:
                found.append(error)

        handle = model.blocks[0].up.weight.register_hook(hook)
        backward(engine, 0)
        handle.remove()
        assert "while a backward is running" in str(found[0])
        engine.step()
    assert safe_get_full_fp32_param(trained) is None  # it is a plain parameter again


def test_parameters_can_be_copied_and_pickled() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        parameter = engine.module.get_parameter("head.weight")
        for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
            assert torch.equal(other, parameter)
            assert vars(other).get("_hp_mapping") is None


@everyday({"gpu_fraction": (0.0, 0.5), "stage": (2, 3), "is_direct": (False, True)})
def test_state_that_is_set_while_it_is_updated(
    gpu_fraction: float, stage: int, is_direct: bool
) -> None:
    """The step's own new copy, still on its way, does not overwrite what was set."""
    config = make_config(gpu_fraction=gpu_fraction, stage=stage, clipping=1e-2, direct=is_direct)
    for seed in (1, 2):
        with (
            environment("HYTRAIN_DELAYS", f"{seed}:3000"),
            built(make_model("mlp"), config) as engine,
        ):
            named = dict(engine.module.named_parameters())
            for number in range(2):
                backward(engine, number)
                engine.step()
                for name in ("head.weight", "blocks.0.up.weight"):
                    values = torch.linspace(-0.1, 0.1, named[name].numel()).view(named[name].shape)
                    safe_set_full_fp32_param(named[name], values)
                    with engine.gathered_parameters():
                        assert_same_bits(name, named[name].detach(), values.bfloat16())
                    assert_same_bits(name, safe_get_full_fp32_param(named[name]).cpu(), values)
