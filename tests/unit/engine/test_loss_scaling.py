"""fp16, and autocast in it: the scale moves as DeepSpeed's, a skipped step changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from support.engines import built, device, make_config
from support.models import Mlp, make_batch, make_model
from support.precision import (
    DYNAMIC,
    LR,
    STATIC,
    autocast_forgotten,
    fp16_on_a_cpu,
    plain_zero2,
    scale_moves_after_the_step,
    scaled_loss,
    section_of,
    train,
)
from support.shadow import Shadow
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import ALL_FRACTIONS

from hytrain.errors import LossScaleError
from hytrain.optimizer.loss_scaling import GradScalerRule

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _fp16() -> Iterator[None]:
    with fp16_on_a_cpu(), scale_moves_after_the_step(), autocast_forgotten():
        yield


@pytest.mark.parametrize(
    ("section", "accumulation"),
    [*((section, 1) for section in DYNAMIC), (DYNAMIC[1], 2), (STATIC, 1)],
)
def test_the_scale_moves_as_deepspeeds(section: dict[str, Any], accumulation: int) -> None:
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}
    config = make_config(
        gpu_fraction=0.5, accumulation=accumulation, optimizer=adamw, **section_of(**section)
    )
    with plain_zero2(config) as engine:
        expected = train(engine, 16, accumulation)
    with built(make_model("llama"), config) as engine:
        found = train(engine, 16, accumulation)
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert found[-1][1] >= 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[2] == pytest.approx(theirs[2], rel=5e-5)


@pytest.mark.parametrize(
    ("stage", "clipping", "gpu_fraction"),
    [*((2, 0.05, fraction) for fraction in ALL_FRACTIONS), (2, 0.0, 0.5), (2, 100.0, 0.0),
     (3, 0.05, 0.5), (3, 100.0, 0.0)],
)  # fmt: skip
def test_steps_are_those_of_a_serial_loop(gpu_fraction: float, clipping: float, stage: int) -> None:
    section = {"initial_scale_power": 14, "loss_scale_window": 2, "hysteresis": 1}
    config = make_config(
        gpu_fraction=gpu_fraction, clipping=clipping, stage=stage, **section_of(**section)
    )
    with built(make_model("llama"), config) as engine:
        shadow = Shadow(engine)
        early = 0
        for number, overflows in enumerate([1, 0, 0, 1, 0, 1, 1, 0, 0]):
            engine.backward(scaled_loss(engine, number, 1e9 if overflows else 1.0))
            early += sum(state.update.sent for state in shadow.states)
            assert shadow.step() is bool(overflows)
            if number % 2:
                shadow.check_weights()
        shadow.check()
        assert early, "updates are overlapped"
        assert engine.skipped_steps == 4
        assert next(engine.module.parameters()).dtype == torch.float16
        assert engine.get_global_grad_norm() > 0


def test_overflow_at_the_smallest_scale() -> None:
    section = {"initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1}
    with built(make_model("llama"), make_config(**section_of(**section))) as engine:
        shadow = Shadow(engine)
        engine.backward(scaled_loss(engine, 0, float("nan")))
        assert shadow.step()
        assert engine.get_global_grad_norm() == float("inf")
        assert engine.optimizer.loss_scale == 1.0
        engine.backward(scaled_loss(engine, 1, float("nan")))
        with pytest.raises(LossScaleError, match="min_loss_scale"):
            engine.step()
        # Nothing was changed, and training can go on.
        shadow.gradients.clear()
        engine.backward(scaled_loss(engine, 2))
        assert not shadow.step()
        shadow.check()


@pytest.mark.parametrize("section", [DYNAMIC[1], STATIC], ids=str)
def test_unscaled_backward_is_refused(section: dict[str, Any]) -> None:
    with built(make_model("llama"), make_config(**section_of(**section))) as engine:
        with pytest.raises(RuntimeError, match=r"engine\.scale"):
            scaled_loss(engine, 0).backward()
        scale = engine.optimizer.loss_scale
        engine.scale(scaled_loss(engine, 1)).backward()
        engine.step()
        norm = engine.get_global_grad_norm()
        assert 0 < norm < 100
        assert engine.optimizer.loss_scale == scale


@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_past_the_engine(stage: int) -> None:
    """Its loss is scaled like any other, or refused."""
    config = make_config(gpu_fraction=0.5, stage=stage, **section_of(**STATIC))
    norms: list[float] = []
    for is_past in (False, True):
        with built(make_model("llama"), config) as engine:
            shadow = Shadow(engine)
            for number in range(2):
                loss = scaled_loss(engine.module if is_past else engine, number)
                engine.scale(loss).backward()
                assert not shadow.step()
                norms.append(engine.get_global_grad_norm())
            with pytest.raises(RuntimeError, match=r"engine\.scale"):
                scaled_loss(engine.module if is_past else engine, 2).backward()
            shadow.gradients.clear()
            engine.backward(scaled_loss(engine, 3))
            assert not shadow.step()
            shadow.check()
    assert norms[:2] == norms[2:]


def test_gradients_are_read_and_written_without_the_scale() -> None:
    model = make_model("llama")
    with built(
        model, make_config(gpu_fraction=0.5, **section_of(initial_scale_power=10))
    ) as engine:
        parameter = next(model.parameters())
        engine.backward(scaled_loss(engine, 0))
        gradient = deepspeed.utils.safe_get_full_grad(parameter)
        engine.step()
        assert gradient is not None
        assert float(gradient.norm()) <= engine.get_global_grad_norm() * 1.001
        engine.backward(scaled_loss(engine, 1))
        deepspeed.utils.safe_set_full_grad(parameter, torch.full_like(gradient, 0.5))
        again = deepspeed.utils.safe_get_full_grad(parameter)
        assert again is not None
        assert torch.equal(again, torch.full_like(again, 0.5))


def test_a_scale_of_the_users_own() -> None:
    with built(make_model("llama"), make_config(gpu_fraction=0.5)) as engine:
        assert engine.optimizer.loss_scale == 1.0
        shadow = Shadow(engine)
        engine.optimizer.override_loss_scale(64.0)
        for number in range(3):
            engine.backward(scaled_loss(engine, number))
            assert not shadow.step()
        shadow.check()
        assert engine.get_global_grad_norm() < 100


def test_a_checkpoint_has_the_scale(tmp_path: Path) -> None:
    config = make_config(gpu_fraction=0.5, **section_of(**DYNAMIC[0]))
    with built(make_model("llama"), config) as engine:
        train(engine, 8)
        engine.save_checkpoint(str(tmp_path))
        memory = engine.optimizer.state_dict()
        scale = engine.optimizer.loss_scale
        straight = train(engine, 8)
    with built(make_model("llama", seed=1), config) as engine:
        assert engine.optimizer.loss_scale != scale
        engine.load_checkpoint(str(tmp_path))
        assert engine.optimizer.loss_scale == scale
        assert train(engine, 8) == straight
        engine.optimizer.load_state_dict(memory)
        assert engine.optimizer.loss_scale == scale
    with built(make_model("llama", seed=1), make_config()) as engine:
        engine.load_checkpoint(str(tmp_path))  # in bf16, without a scale
        assert engine.optimizer.loss_scale == 1.0
    with plain_zero2({**config, "checkpoint": {"load_universal": True}}) as engine:
        engine.load_checkpoint(str(tmp_path))
        assert engine.optimizer.cur_scale == scale
        losses = [entry[2] for entry in train(engine, 4)]
    assert losses == pytest.approx([entry[2] for entry in straight[:4]], rel=2e-3)


@pytest.mark.parametrize(
    ("stage", "gpu_fraction", "dtype"),
    [(2, 0.0, "float16"), (2, 0.5, "bfloat16"), (2, 1.0, "float16"), (3, 0.5, "bfloat16"),
     (3, 0.5, "float16")],
)  # fmt: skip
def test_autocast_over_an_fp32_training_copy(stage: int, gpu_fraction: float, dtype: str) -> None:
    autocast = {"enabled": True, "dtype": dtype}
    config = make_config(
        gpu_fraction=gpu_fraction, bf16=False, stage=stage, torch_autocast=autocast
    )
    seen: list[torch.dtype] = []
    with built(make_model("llama"), config) as engine:
        linear = next(m for m in engine.module.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
        shadow = Shadow(engine)
        for number, overflows in enumerate([0, 1, 0, 0]):
            engine.backward(scaled_loss(engine, number, float("inf") if overflows else 1.0))
            assert shadow.step() is bool(overflows)
        shadow.check()
        assert set(seen) == {getattr(torch, dtype)}
        assert next(engine.module.parameters()).dtype == torch.float32
        expected = 32768.0 if dtype == "float16" else 1.0
        assert engine.optimizer.loss_scale == expected


def test_autocasts_scale_moves_as_torchs() -> None:
    rule, steps = GradScalerRule(), torch.randint(0, 3000, (9000,)) == 0
    scaler = torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(torch.ones(1))
    for overflow in steps.tolist():
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        rule.update_scale(overflow)
        assert rule.cur_scale == scaler.get_scale()


class Uncast(Mlp):
    """Takes its input as it is."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().pow(2).mean()


@pytest.mark.parametrize("accumulation", ["micro_batch_major", "layer_major"])
def test_inputs_are_cast(accumulation: str) -> None:
    """``fp16.auto_cast``; of several forwards at once each one's."""
    config = make_config(
        gpu_fraction=0.5, accumulation=2, hytrain={"accumulation": accumulation},
        **section_of(auto_cast=True, initial_scale_power=8),
    )  # fmt: skip
    with built(Uncast(), config) as engine:
        batches = iter([(make_batch("mlp", number, device())["inputs"],) for number in range(6)])
        for _ in range(3):
            assert torch.isfinite(engine.train_batch(batches, num_valid=lambda _batch: 1))


class Segments(nn.Module):
    """All weights lie in reentrant segments: gradients arrive in graphs within the backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.pow(2).mean()


def _reentrant_past_the_engine(scale: float | None, stage: int) -> list[torch.Tensor]:
    """Master weights after three steps; each has one backward."""
    with built(Segments(), make_config(gpu_fraction=0.5, bf16=False, stage=stage)) as engine:
        if scale is not None:
            engine.optimizer.override_loss_scale(scale)
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            engine.scale(engine.module(x.requires_grad_())).backward()
            assert engine.optimizer.passes.open_step.in_backward is False
            engine.step()
        return [state["fp32"] for state in engine.fp32_state_dict().values()]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_reentrant_backward_past_the_engine_is_one(stage: int) -> None:
    """Its loss is scaled once; a power of two changes no bit."""
    scaled, plain = (_reentrant_past_the_engine(scale, stage) for scale in (64.0, None))
    assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))
    assert not torch.equal(plain[0], Segments().blocks[0].weight.detach())
