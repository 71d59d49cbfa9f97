"""fp16 and autocast: trainings whose gradients overflow, with hytrain and plain DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.engines import device
from support.models import loss_of, make_batch, make_model


@contextmanager
def fp16_on_a_cpu() -> Iterator[None]:
    """Lets DeepSpeed use fp16 on a CPU: torch computes in it, DeepSpeed asks for other hardware."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda _self: True)
        yield


@contextmanager
def autocast_forgotten() -> Iterator[None]:
    """Undoes at the end of the block that DeepSpeed remembers autocast for the whole process."""
    from deepspeed.runtime import torch_autocast

    with pytest.MonkeyPatch.context() as patch:
        for name in ("TORCH_AUTOCAST_INITIALIZED", "TORCH_AUTOCAST_DTYPE"):
            patch.setattr(torch_autocast, name, vars(torch_autocast)[name])
        yield


@contextmanager
def scale_moves_after_the_step() -> Iterator[None]:
    """Makes DeepSpeed's ZeRO-1 and 2 change the loss scale after a step instead of within it.

    Without this, gradients of a step after which the scale doubles are divided by the doubled scale
    (0.19.8, ``stage_1_and_2.py``): they count half.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    step: Any = DeepSpeedZeroOptimizer.step
    update: Any = vars(DeepSpeedZeroOptimizer)["_update_scale"]
    overflows: list[Any] = []

    def late(self: Any, *arguments: Any, **named: Any) -> None:
        overflows.clear()
        step(self, *arguments, **named)
        update(self, overflows[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedZeroOptimizer, "_update_scale", lambda _s, o: overflows.append(o))
        patch.setattr(DeepSpeedZeroOptimizer, "step", late)
        yield


def section_of(**keys: Any) -> dict[str, Any]:
    """The sections of a configuration for fp16, with these keys."""
    return {"bf16": False, "fp16": {"enabled": True, **keys}}


def scaled_loss(engine: Any, number: int, factor: float = 1.0) -> torch.Tensor:
    """Returns a loss in fp32, as libraries compute it; ``factor`` makes gradients overflow."""
    return loss_of(engine(**make_batch("llama", number, device()))).float() * factor


DYNAMIC = [
    {"initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1},
    {"initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 2},
    {"initial_scale_power": 12, "loss_scale_window": 3, "hysteresis": 3,
     "consecutive_hysteresis": True},
]  # fmt: skip
STATIC = {"loss_scale": 128.0}
LR = 1e-3


@contextmanager
def plain_zero2(config: dict[str, Any]) -> Iterator[Any]:
    """An engine of plain DeepSpeed's ZeRO-2, with torch's AdamW on the device."""
    import deepspeed

    config = {key: value for key, value in config.items() if key not in ("hytrain", "optimizer")}
    config["zero_optimization"] = {"stage": 2}
    model = make_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    try:
        yield engine
    finally:
        engine.destroy()


def train(engine: Any, steps: int, accumulation: int = 1) -> list[tuple[float, int, float]]:
    """Returns scale, skipped steps and loss after each step; every seventh gradient overflows."""
    found: list[tuple[float, int, float]] = []
    for step in range(steps):
        for micro in range(accumulation):
            overflows = step % 7 == 5 and micro == 0
            loss = scaled_loss(engine, step * accumulation + micro, 1e9 if overflows else 1.0)
            engine.backward(loss)
            engine.step()
        found.append((float(engine.optimizer.cur_scale), engine.skipped_steps, loss.item()))
    return found
