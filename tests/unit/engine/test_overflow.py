"""Steps that overflow, and steps that are clipped otherwise than was forecast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.covering import everyday
from support.engines import built, environment, make_config
from support.models import loss_of, make_model
from support.shadow import Shadow
from training import ALL_FRACTIONS, backward, inputs

from hytrain.kernels.clipping import CLIPPED_IN_A_ROW, ClipForecast, Outcome

pytestmark = pytest.mark.timeout(120)


# -- a step with an inf or NaN in its gradient changes nothing, bit for bit --------------------


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


@everyday(
    {"where": ("first", "last"), "gpu_fraction": ALL_FRACTIONS, "clipping": (0.0, 0.05, 100.0)}
)
def test_skipped_steps(where: str, gpu_fraction: float, clipping: float) -> None:
    value, bf16 = {"first": (float("inf"), True), "last": (float("nan"), False)}[where]
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


# -- steps that are taken for clipped before they are ------------------------------------------


def test_a_skipped_step_says_nothing() -> None:
    forecast = ClipForecast()
    for number in range(CLIPPED_IN_A_ROW):
        assert not forecast.is_clipped
        forecast.note(Outcome(scale=0.5, norm=2.0, coefficient=0.5, skip=False))
        if number == 3:
            forecast.note(Outcome(scale=0.0, norm=float("inf"), coefficient=1.0, skip=True))
    assert forecast.is_clipped
    forecast.note(Outcome(scale=1.0, norm=0.5, coefficient=1.0, skip=False))
    assert not forecast.is_clipped


@pytest.mark.parametrize("delays", ["", "5:300"])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
def test_a_wrong_forecast_changes_no_number(gpu_fraction: float, delays: str) -> None:
    """Clipped for longer than it takes, not clipped where that is expected, and clipped again."""
    factors = [1e3] * (CLIPPED_IN_A_ROW + 2) + [1e-3] * 3 + [1e3] * CLIPPED_IN_A_ROW + [1e-3, 1e3]
    config = make_config(gpu_fraction=gpu_fraction, clipping=0.5)
    with environment("HYTRAIN_DELAYS", delays), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        cpu, limits = engine.optimizer.pipeline.cpu, []
        begin_step = cpu.begin_step

        def begin(limit: float) -> None:
            limits.append(limit)
            begin_step(limit)

        cpu.begin_step = begin
        clipped: list[bool] = []
        for number, factor in enumerate(factors):
            engine.backward(factor * loss_of(engine(**inputs(number))))
            assert not shadow.step()
            clipped.append(shadow.coefficient < 1.0)
        shadow.check()
    assert clipped == [factor > 1.0 for factor in factors]
    held = [limit < 0.0 for limit in limits]
    # The first backward holds for another reason: it does not know the order of gradients yet.
    assert held[1:] == [
        i >= CLIPPED_IN_A_ROW and all(clipped[i - CLIPPED_IN_A_ROW : i])
        for i in range(1, len(held))
    ]
