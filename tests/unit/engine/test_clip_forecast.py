"""Steps that are taken for clipped before they are: previews wait, and no number changes."""

from __future__ import annotations

import pytest
from support.engines import built, environment, make_config
from support.models import loss_of, make_model
from support.shadow import Shadow
from training import inputs

from hytrain.kernels.clipping import CLIPPED_IN_A_ROW, ClipForecast, Outcome

pytestmark = pytest.mark.timeout(120)


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
