"""Without clipping and overflow check a gradient is committed the moment it arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import Recomputed, make_model
from support.shadow import Shadow
from support.short_memory import short_of_memory
from training import FRACTIONS, Faulty, UserError, backward, inputs

from hytrain.errors import AbortedBackwardError, ConfigError, GradientOrderError

pytestmark = pytest.mark.timeout(60)


def _config(gpu_fraction: float, **more: Any) -> dict[str, Any]:
    bf16 = {"enabled": True, "check_grad_overflow": False}
    return make_config(gpu_fraction=gpu_fraction, clipping=0.0, **more) | {"bf16": bf16}


@pytest.mark.parametrize("delays", ["", "3:400"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_exact(gpu_fraction: float, accumulation: int, delays: str) -> None:
    config = _config(gpu_fraction, accumulation=accumulation)
    with environment("HYTRAIN_DELAYS", delays), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        assert engine.optimizer.pipeline.norm.settings.direct
        for number in range(6 * accumulation):
            backward(engine, number)
            if engine.is_gradient_accumulation_boundary():
                shadow.step()
            else:
                engine.step()
            if number == 3:
                shadow.check_weights()
        shadow.check()
        norm = torch.stack([g.double().pow(2).sum() for g in shadow.last.values()]).sum().sqrt()
        assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm))


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_a_first_backward_whose_gradients_do_not_fit_sends_them(gpu_fraction: float) -> None:
    """...and the numbers are the same."""
    with short_of_memory() as early, built(make_model("mlp"), _config(gpu_fraction)) as engine:
        shadow = Shadow(engine)
        for number in range(4):
            early.clear()
            backward(engine, number)
            assert early[:4] == [5, 4, 3, 2]
            shadow.step()
        shadow.check()


def test_a_layer_that_proves_incomplete_in_such_a_first_backward_is_an_error() -> None:
    model = Recomputed()
    model.times = 2
    says = "with clipping or an overflow check one rank takes such an update back"
    with (
        short_of_memory(),
        built(model, _config(0.0)) as engine,
        pytest.raises(GradientOrderError, match=says),
    ):
        backward(engine, 0)


def test_nothing_stays_pending() -> None:
    with built(make_model("mlp"), _config(0.0)) as engine:
        cpu = engine.optimizer.pipeline.cpu
        for number in range(3):
            backward(engine, number)
            engine.step()
        engine.synchronize()
        assert not any(cpu.has_pending(layer) for layer in cpu.layers)


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
@pytest.mark.parametrize("what", ["forward", "backward", "synchronize", "state_dict"])
def test_using_the_weights_before_step_says_what_to_change(what: str, gpu_fraction: float) -> None:
    with built(make_model("mlp"), _config(gpu_fraction)) as engine:
        backward(engine, 0)
        engine.step()
        second = engine(**inputs(2)) if what == "backward" else None
        backward(engine, 1)
        uses = {
            "forward": lambda: engine(**inputs(3)),
            "backward": lambda: engine.backward(second),
            "synchronize": engine.synchronize,
            "state_dict": engine.module.state_dict,
        }
        with pytest.raises(ConfigError, match=r'set "gradient_clipping" or "check_grad_overflow"'):
            uses[what]()


def test_changing_hyper_parameters_before_step_says_what_to_change() -> None:
    with built(make_model("mlp"), _config(0.0)) as engine:
        for number in range(2):
            backward(engine, number)
            if number:
                engine.optimizer.param_groups[0]["lr"] = 0.5
                with pytest.raises(ConfigError, match="change them before backward"):
                    engine.step()
            else:
                engine.step()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_changing_hyper_parameters_before_backward_is_fine(gpu_fraction: float) -> None:
    with built(make_model("mlp"), _config(gpu_fraction)) as engine:
        shadow = Shadow(engine)
        for number in range(4):
            engine.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number)
            backward(engine, number)
            shadow.step()
        shadow.check()


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
@pytest.mark.parametrize("what", ["forward", "step", "synchronize", "state_dict", "save"])
def test_an_exception_in_backward_leaves_a_part_of_a_step(
    what: str, gpu_fraction: float, tmp_path: Path
) -> None:
    """Every use says so, until a checkpoint is loaded; then training goes on as from there."""
    model = Faulty()
    with built(model, _config(gpu_fraction)) as engine:
        for number in range(2):
            backward(engine, number)
            engine.step()
        engine.save_checkpoint(tmp_path)
        model.fail_backward = 0
        with pytest.raises(UserError):
            backward(engine, 50)
        model.fail_backward = None
        uses = {
            "forward": lambda: engine(**inputs(3)),
            "step": engine.step,
            "synchronize": engine.synchronize,
            "state_dict": engine.module.state_dict,
            "save": lambda: engine.save_checkpoint(tmp_path / "other"),
        }
        for _ in range(2):
            with pytest.raises(AbortedBackwardError, match=r"Load a checkpoint with engine\.load_"):
                uses[what]()
        engine.load_checkpoint(tmp_path)
        shadow = Shadow(engine)
        assert shadow.steps == 2
        for number in range(2, 5):
            backward(engine, number)
            shadow.step()
        shadow.check()


@pytest.mark.parametrize("fault", ["first", "gpu"])
def test_an_exception_before_anything_was_committed(fault: str) -> None:
    """In the first backward, and where all layers are on the GPU, no update has begun."""
    model = Faulty()
    with built(model, _config(1.0 if fault == "gpu" else 0.0)) as engine:
        shadow = Shadow(engine)
        if fault == "gpu":
            backward(engine, 0)
            shadow.step()
        model.fail_backward = 0
        with pytest.raises(UserError):
            backward(engine, 50)
        model.fail_backward = None
        shadow.gradients.clear()
        with pytest.raises(AbortedBackwardError, match="were discarded"):
            engine.step()
        for number in range(1, 4):
            backward(engine, number)
            shadow.step()
        shadow.check()


def test_a_late_gradient_says_that_layers_may_have_been_committed() -> None:
    model = Recomputed()
    with built(model, _config(0.0)) as engine:
        for number in range(2):
            backward(engine, number)
            engine.step()
        model.times = 2
        with pytest.raises(GradientOrderError, match="some layers may have been committed"):
            backward(engine, 2)
        with pytest.raises(AbortedBackwardError, match="some layers have made this step"):
            engine.step()
