"""A step with an inf or NaN in its gradient changes nothing, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import make_model
from support.shadow import Shadow
from training import ALL_FRACTIONS, backward

pytestmark = pytest.mark.timeout(60)


class Poison:
    """Puts a value into one element of the gradient of the first or last layer, when armed."""

    def __init__(self, model: torch.nn.Module, where: str) -> None:
        self.value: float | None = None
        parameters = list(model.parameters())
        target = parameters[0] if where == "first" else parameters[-1]
        target.register_hook(self._strike)

    def _strike(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.value is None:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[1] = self.value
        return gradient


@pytest.mark.parametrize("clipping", [0.0, 0.05, 100.0])
@pytest.mark.parametrize("gpu_fraction", ALL_FRACTIONS)
@pytest.mark.parametrize(
    ("value", "where", "bf16"), [(float("inf"), "first", True), (float("nan"), "last", False)]
)
def test_skipped_steps(
    value: float, where: str, gpu_fraction: float, bf16: bool, clipping: float
) -> None:
    model = make_model("mlp")
    poison = Poison(model, where)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 20}}
    config = make_config(
        gpu_fraction=gpu_fraction, bf16=bf16, clipping=clipping, scheduler=scheduler
    )
    with built(model, config) as engine:
        shadow = Shadow(engine)
        # The first step's; right after a step with a gradient pending; two in a row.
        for number, strikes in enumerate([True, False, False, True, False, True, True, False]):
            poison.value = value if strikes else None
            backward(engine, number)
            skipped_before, scheduled_before = engine.skipped_steps, _schedule(engine)
            assert shadow.step() is strikes
            assert engine.skipped_steps == skipped_before + strikes
            assert (_schedule(engine) == scheduled_before) is strikes
            if number % 2:  # right after a skip, right before one, and between
                shadow.check()  # commits what is pending
        shadow.check()
        assert shadow.steps == 4


def _schedule(engine: Any) -> int:
    return int(engine.lr_scheduler.last_batch_iteration)


@pytest.mark.parametrize(
    ("value", "clipping", "gpu_fraction"),
    [(float("inf"), 0.05, 0.0), (float("nan"), 0.0, 0.0), (float("nan"), 0.05, 1.0)],
)
def test_without_the_check_the_step_is_made(
    value: float, clipping: float, gpu_fraction: float
) -> None:
    """As DeepSpeed: nothing is skipped, and a norm that is no number counts as infinite."""
    model = make_model("mlp")
    poison = Poison(model, "last")
    bf16 = {"enabled": True, "check_grad_overflow": False}
    config = make_config(gpu_fraction=gpu_fraction, clipping=clipping, hytrain={}) | {"bf16": bf16}
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for number, strikes in enumerate([False, True]):
            poison.value = value if strikes else None
            backward(engine, number)
            assert shadow.step() is False
        assert engine.skipped_steps == 0
        shadow.check()
        last = list(model.parameters())[-1]
        assert torch.isnan(last).nonzero().tolist() == [[1]]


def test_an_overflow_in_an_earlier_micro_batch_skips() -> None:
    model = make_model("mlp")
    poison = Poison(model, "first")
    with built(model, make_config(accumulation=3)) as engine:
        shadow = Shadow(engine)
        for micro in range(6):
            poison.value = float("inf") if micro == 1 else None
            backward(engine, micro)
            if micro % 3 == 2:
                assert shadow.step() is (micro == 2)
            else:
                engine.step()
        shadow.check()
