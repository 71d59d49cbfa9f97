"""zero_grad() drops what a step has accumulated so far, as it does in torch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import Mlp, make_model
from support.shadow import Shadow
from training import FRACTIONS, Faulty, backward, followed, make_steps

from hytrain.errors import ConfigError

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


def _zero(engine: Any, who: str) -> None:
    (engine if who == "engine" else engine.optimizer).zero_grad()


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


def test_reports_of_a_step_without_gradients(gpu_fraction: float, tmp_path: Path) -> None:
    """Also of the first one: it has figures of its own."""
    path = tmp_path / "metrics.jsonl"
    config = make_config(
        gpu_fraction=gpu_fraction, hytrain={"metrics": str(path)}, wall_clock_breakdown=True
    )
    with built(make_model("mlp"), config) as engine:
        for number, drops in enumerate((True, False, True)):
            backward(engine, number)
            if drops:
                engine.zero_grad()
            engine.step()
            assert engine.step_statistics().skipped is drops
            assert (engine.get_global_grad_norm() == 0.0) is drops
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(r["step"], r["skipped"]) for r in records if r["kind"] == "step"]
    assert found == [(1, True), (2, False), (3, True)]


def test_a_step_that_is_given_up(gpu_fraction: float, caplog: pytest.LogCaptureFixture) -> None:
    """Without step(): the next backward begins anew. It is said once."""
    with (
        caplog.at_level(logging.WARNING, logger="hytrain"),
        followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run,
    ):
        for step in range(4):
            backward(run.engine, 60 + step)
            run.engine.zero_grad()
            run.good_step(step)
    assert caplog.text.count("has dropped the gradients") == 1


def test_after_an_exception(gpu_fraction: float) -> None:
    model = Faulty()
    with followed(model, gpu_fraction=gpu_fraction) as run:
        for step in range(3):
            with model.failing(block=2):
                backward(run.engine, 50)
            run.engine.zero_grad()
            run.good_step(step)


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
        make_steps(shadow, range(2))
        shadow.check()
    assert all("zero_grad() while a backward is running" in text for text in found)
    assert len(found) == 2


def test_gradients_that_nobody_dropped_stay(gpu_fraction: float) -> None:
    """The module's own zero_grad() reaches ``.grad`` only, which is always empty."""
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        for step in range(3):
            with run.step(step):
                backward(run.engine, step)
                run.engine.module.zero_grad()
