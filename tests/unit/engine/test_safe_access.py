"""deepspeed.utils.safe_get_* and safe_set_* on one rank; several are in tests/dist."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from support.comparisons import assert_same_bits
from support.engines import built, environment, make_config
from support.models import Mlp, make_model
from training import FRACTIONS, backward, followed, inputs

from hytrain.errors import ConfigError

pytestmark = pytest.mark.timeout(120)


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


@pytest.mark.parametrize("is_direct", [False, True], ids=["held", "direct"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
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
