"""deepspeed.utils.safe_get_* and safe_set_* on one rank; several are in tests/dist."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from support.comparisons import assert_same_bits
from support.engines import built, environment, make_config
from support.models import Mlp, make_model
from support.shadow import Shadow, Twin
from training import FRACTIONS, backward, inputs

from hytrain.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

KINDS = ("exp_avg", "exp_avg_sq")


def _check_state(engine: Any) -> None:
    """What DeepSpeed's functions read is what the engine knows."""
    found = {
        name: {
            "fp32": safe_get_full_fp32_param(p),
            **{kind: safe_get_full_optimizer_state(p, kind) for kind in KINDS},
        }
        for name, p in engine.module.named_parameters()
    }
    expected = engine.fp32_state_dict()
    assert found.keys() == expected.keys()
    for name, tensors in found.items():
        for kind, tensor in tensors.items():
            assert_same_bits(f"{kind} of {name}", tensor.cpu(), expected[name][kind])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_state_is_that_of_the_last_step(gpu_fraction: float, stage: int) -> None:
    """Read while the worker is slow, between steps and between backward and step."""
    config = make_config(gpu_fraction=gpu_fraction, clipping=0.5, stage=stage)
    with environment("HYTRAIN_DELAYS", "3:1500"), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for number in range(4):
            backward(engine, number)
            if number % 2:
                _check_state(engine)
            shadow.step()
            if number != 2:
                _check_state(engine)
        shadow.check()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_gradients_so_far(gpu_fraction: float, stage: int, accumulation: int) -> None:
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(
        gpu_fraction=gpu_fraction, bf16=False, clipping=0.5, stage=stage, accumulation=accumulation
    )
    with built(model, config) as engine:
        shadow = Shadow(engine)
        named = dict(engine.module.named_parameters())
        for step in range(4):
            with pytest.raises(ConfigError, match="reading a gradient, but there is none"):
                safe_get_full_grad(named["head.bias"])
            batches = [inputs(step * accumulation + micro) for micro in range(accumulation)]
            for micro in range(accumulation):
                so_far = twin.gradients(engine, batches[: micro + 1], 1 / accumulation)
                backward(engine, step * accumulation + micro)
                if step != 2:
                    for name, expected in so_far.items():
                        found = safe_get_full_grad(named[name])
                        assert found.dtype == torch.float32
                        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)
                if micro + 1 < accumulation:
                    engine.step()
            shadow.step()
            twin.assert_were_reduced(shadow, so_far)
        shadow.check()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_gradients_that_are_written_are_applied(gpu_fraction: float, stage: int) -> None:
    config = make_config(
        gpu_fraction=gpu_fraction, bf16=False, clipping=0.5, stage=stage, accumulation=2
    )
    model = make_model("mlp")
    twin = Twin(model)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        named = dict(engine.module.named_parameters())
        for step in range(4):
            first = twin.gradients(engine, [inputs(2 * step)], 0.5)
            expected = twin.gradients(engine, [inputs(2 * step), inputs(2 * step + 1)], 0.5)
            backward(engine, 2 * step)
            early = torch.full_like(first["embed.weight"], 0.03)
            safe_set_full_grad(named["embed.weight"], early)
            expected["embed.weight"] = expected["embed.weight"] - first["embed.weight"] + early
            engine.step()
            backward(engine, 2 * step + 1)
            for name in ("blocks.1.up.weight", "head.bias"):
                expected[name] = safe_get_full_grad(named[name]).cpu() * 2
                safe_set_full_grad(named[name], expected[name])
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_state_that_is_written_is_trained_on(gpu_fraction: float, stage: int) -> None:
    config = make_config(gpu_fraction=gpu_fraction, clipping=0.5, stage=stage)
    with environment("HYTRAIN_DELAYS", "5:1500"), built(make_model("mlp"), config) as engine:
        parameter = engine.module.get_parameter("blocks.2.down.weight")
        for number in range(2):
            backward(engine, number)
            engine.step()
        values = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
        safe_set_full_fp32_param(parameter, values)
        safe_set_full_optimizer_state(parameter, values / 8, "exp_avg")
        safe_set_full_optimizer_state(parameter, values.square() / 16, "exp_avg_sq")
        assert torch.equal(safe_get_full_fp32_param(parameter).cpu(), values)
        assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg").cpu(), values / 8)
        assert torch.equal(parameter.detach().cpu(), values.bfloat16())  # the next forward's
        shadow = Shadow(engine)
        for number in range(2, 5):
            backward(engine, number)
            shadow.step()
        shadow.check()


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


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_updates_that_are_committed_directly(gpu_fraction: float) -> None:
    config = make_config(gpu_fraction=gpu_fraction, clipping=0.0)
    config["bf16"]["check_grad_overflow"] = False
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        parameter = engine.module.get_parameter("head.weight")
        for number in range(3):
            backward(engine, number)
            if number:
                for read in (safe_get_full_grad, safe_get_full_fp32_param):
                    with pytest.raises(ConfigError, match="between backward and step"):
                        read(parameter)
            shadow.step()
            safe_get_full_fp32_param(parameter)
        shadow.check()


def test_parameters_can_be_copied_and_pickled() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        parameter = engine.module.get_parameter("head.weight")
        for other in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter))):
            assert torch.equal(other, parameter)
            assert vars(other).get("_hp_mapping") is None


@pytest.mark.parametrize("is_direct", [False, True], ids=["held", "direct"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS[:2])
def test_state_that_is_set_while_it_is_updated(
    gpu_fraction: float, stage: int, is_direct: bool
) -> None:
    """The step's own new copy, still on its way, does not overwrite what was set."""
    config = make_config(
        gpu_fraction=gpu_fraction, stage=stage, clipping=0.0 if is_direct else 1e-2
    )
    config["bf16"]["check_grad_overflow"] = not is_direct
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
