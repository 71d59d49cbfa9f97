"""fp16 and autocast on a GPU: the scale, what a skipped step leaves alone, dtypes of the copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, device, environment, make_config
from support.models import make_model
from support.precision import (
    DYNAMIC,
    LR,
    STATIC,
    autocast_forgotten,
    plain_zero2,
    scale_moves_after_the_step,
    scaled_loss,
    section_of,
    train,
)
from support.shadow import Shadow
from support.streams import stream_delays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]
OVERFLOWS = [1, 0, 0, 1, 0, 1, 1, 0, 0]
AUTOCAST = [{"torch_autocast": {"enabled": True, "dtype": d}} for d in ("bfloat16", "float16")]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with scale_moves_after_the_step(), autocast_forgotten():
        yield


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
@pytest.mark.parametrize("section", [*DYNAMIC, STATIC], ids=str)
def test_the_scale_moves_as_deepspeeds(section: dict[str, Any], gpu_fraction: float) -> None:
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}
    config = make_config(gpu_fraction=gpu_fraction, optimizer=adamw, **section_of(**section))
    with plain_zero2(config) as engine:
        expected = train(engine, 16)
    with built(make_model("llama"), config) as engine:
        found = train(engine, 16)
        assert next(engine.module.parameters()).dtype == torch.float16
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    assert found[-1][1] >= 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[2] == pytest.approx(theirs[2], rel=2e-3)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("delays", [None, 1])
@pytest.mark.parametrize(
    "sections",
    [section_of(initial_scale_power=14, loss_scale_window=2, hysteresis=1), *AUTOCAST],
    ids=["fp16", "autocast bf16", "autocast fp16"],
)
def test_steps_are_those_of_a_serial_loop(
    sections: dict[str, Any], stage: int, delays: int | None
) -> None:
    """On the host, whose kernels the serial loop has, too; no step is clipped."""
    config = make_config(clipping=1e6, stage=stage, **{"bf16": False, **sections})
    disturb = None if delays is None else stream_delays(delays)
    delayed = nullcontext() if delays is None else environment("HYTRAIN_DELAYS", f"{delays}:300")
    with delayed, built(make_model("llama"), config) as engine:
        shadow = Shadow(engine)
        for number, overflows in enumerate(OVERFLOWS):
            loss = scaled_loss(engine, number, float("inf") if overflows else 1.0)
            if disturb is not None:
                disturb(engine)
            engine.backward(loss)
            assert shadow.step() is bool(overflows)
        shadow.check()
        assert engine.skipped_steps == sum(OVERFLOWS)


def _state(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Master weights and moments, and the training copy as "copy"."""
    found = {n: {k: t.clone() for k, t in s.items()} for n, s in engine.fp32_state_dict().items()}
    with engine.gathered_parameters():
        for name, parameter in engine.module.named_parameters():
            found[name]["copy"] = parameter.detach().cpu().clone()
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_a_skipped_step_changes_nothing(clipping: float, gpu_fraction: float, stage: int) -> None:
    section = section_of(initial_scale_power=12, hysteresis=1)
    config = make_config(gpu_fraction=gpu_fraction, clipping=clipping, stage=stage, **section)
    with built(make_model("llama"), config) as engine:
        for number in range(6):
            overflows = number in (2, 4)
            before = _state(engine)
            scale = engine.optimizer.loss_scale
            engine.backward(scaled_loss(engine, number, float("nan") if overflows else 1.0))
            engine.step()
            assert engine.optimizer.overflow is overflows
            assert engine.optimizer.loss_scale == (scale / 2 if overflows else scale)
            after = _state(engine)
            if not overflows:
                assert any(not torch.equal(after[n]["fp32"], before[n]["fp32"]) for n in before)
                continue
            assert_same_states(after, before)
        assert engine.skipped_steps == 2


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
@pytest.mark.parametrize("sections", AUTOCAST, ids=["bf16", "fp16"])
def test_autocast_over_an_fp32_training_copy(sections: dict[str, Any], gpu_fraction: float) -> None:
    """Losses are those of the same model under torch's own autocast."""
    dtype = getattr(torch, sections["torch_autocast"]["dtype"])
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}}
    config = make_config(
        gpu_fraction=gpu_fraction, clipping=0.0, bf16=False, optimizer=adamw, **sections
    )
    plain = make_model("llama").to(device())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0)
    seen: list[torch.dtype] = []
    with built(make_model("llama"), config) as engine:
        linear = next(m for m in engine.module.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
        for number in range(4):
            with torch.autocast("cuda", dtype):
                expected = scaled_loss(plain, number)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = scaled_loss(engine, number)
            engine.backward(loss)
            engine.step()
            assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
        assert set(seen) == {dtype}
        assert next(engine.module.parameters()).dtype == torch.float32
        assert engine.optimizer.loss_scale == (65536.0 if dtype == torch.float16 else 1.0)
