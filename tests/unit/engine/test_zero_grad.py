"""zero_grad() drops what a step has accumulated so far, as it does in torch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import Mlp, make_model
from support.shadow import Shadow, Twin
from training import FRACTIONS, Faulty, UserError, backward, inputs

from hytrain.errors import ConfigError

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


def _zero(engine: Any, who: str) -> None:
    (engine if who == "engine" else engine.optimizer).zero_grad()


@pytest.mark.parametrize("clipping", [0.5, 0.0])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("who", ["engine", "optimizer"])
def test_micro_batches_before_it_do_not_count(
    gpu_fraction: float, who: str, stage: int, clipping: float
) -> None:
    """Also where updates are committed directly: before the last backward none has begun."""
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(
        gpu_fraction=gpu_fraction, bf16=False, accumulation=3, stage=stage, clipping=clipping
    )
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for step in range(5):
            dropped = step % 4  # 3: none
            batches = [inputs(3 * step + micro) for micro in range(3)]
            counted = batches[dropped + 1 :] if dropped < 2 else batches
            expected = twin.gradients(engine, counted, 1 / 3)
            for micro in range(3):
                backward(engine, 3 * step + micro)
                if micro == dropped and dropped < 2:
                    _zero(engine, who)
                if micro < 2:
                    engine.step()
                    if micro == dropped and step == 4:
                        _zero(engine, who)  # nothing is left to drop
            shadow.step()
            _zero(engine, who)  # as most loops do
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("who", ["engine", "optimizer"])
def test_a_step_without_gradients_updates_nothing(
    gpu_fraction: float, who: str, accumulation: int
) -> None:
    """Layers whose update had begun are taken back; the step counts as skipped."""
    config = make_config(gpu_fraction=gpu_fraction, accumulation=accumulation)
    model = make_model("mlp")
    schedule: Any = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)  # noqa: E731
    with built(model, config, lr_scheduler=schedule) as engine:
        shadow = Shadow(engine)
        for number in range(0, 8, 2):
            for micro in range(accumulation):
                if micro:
                    engine.step()
                backward(engine, 40 + number + micro)
            rate = engine.get_lr()
            _zero(engine, who)
            engine.step()
            shadow.gradients.clear()
            assert engine.optimizer.overflow
            assert engine.get_lr() == rate
            shadow.check()
            for micro in range(accumulation):
                if micro:
                    engine.step()
                backward(engine, number + micro)
            shadow.step()
            shadow.check()
        assert engine.skipped_steps == 4
        assert engine.global_steps == 8


def test_a_step_that_is_given_up(gpu_fraction: float, caplog: pytest.LogCaptureFixture) -> None:
    """Without step(): the next backward begins anew. It is said once."""
    model = make_model("mlp")
    twin = Twin(model)
    with built(model, make_config(gpu_fraction=gpu_fraction, bf16=False)) as engine:
        shadow = Shadow(engine)
        with caplog.at_level(logging.WARNING, logger="hytrain"):
            for step in range(4):
                backward(engine, 60 + step)
                engine.zero_grad()
                expected = twin.gradients(engine, [inputs(step)])
                backward(engine, step)
                shadow.step()
                twin.assert_were_reduced(shadow, expected)
        shadow.check()
    assert caplog.text.count("has dropped the gradients") == 1


def test_after_an_exception(gpu_fraction: float) -> None:
    model = Faulty()
    twin = Twin(model)
    with built(model, make_config(gpu_fraction=gpu_fraction, bf16=False)) as engine:
        shadow = Shadow(engine)
        for step in range(3):
            model.fail_backward = 2
            with pytest.raises(UserError):
                backward(engine, 50)
            model.fail_backward = None
            engine.zero_grad()
            expected = twin.gradients(engine, [inputs(step)])
            backward(engine, step)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_inside_of_a_backward(gpu_fraction: float) -> None:
    model = Mlp()
    found: list[str] = []
    with built(model, make_config(gpu_fraction=gpu_fraction)) as engine:
        shadow = Shadow(engine)

        def hook(_gradient: torch.Tensor) -> None:
            try:
                engine.zero_grad()
            except ConfigError as error:
                found.append(str(error))

        model.blocks[0].up.weight.register_hook(hook)
        for number in range(2):
            backward(engine, number)
            shadow.step()
        shadow.check()
    assert all("zero_grad() while a backward is running" in text for text in found)
    assert len(found) == 2


def test_updates_that_are_committed_directly(gpu_fraction: float) -> None:
    config = make_config(gpu_fraction=gpu_fraction, clipping=0.0)
    config["bf16"]["check_grad_overflow"] = False
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for number in range(3):
            backward(engine, number)
            if number:  # the first backward sends nothing before its step
                with pytest.raises(ConfigError, match=r"zero_grad\(\) between backward and step"):
                    engine.zero_grad()
            shadow.step()
        shadow.check()


def test_gradients_that_nobody_dropped_stay(gpu_fraction: float) -> None:
    """The module's own zero_grad() reaches ``.grad`` only, which is always empty."""
    model = make_model("mlp")
    twin = Twin(model)
    with built(model, make_config(gpu_fraction=gpu_fraction, bf16=False)) as engine:
        shadow = Shadow(engine)
        for step in range(3):
            expected = twin.gradients(engine, [inputs(step)])
            backward(engine, step)
            engine.module.zero_grad()
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()
