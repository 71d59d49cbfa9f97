"""Several forwards before a backward, as preference and contrastive losses have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import make_model
from training import FRACTIONS, followed, inputs

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]

STEPS = 4


def _one_loss(engine: Any, one: torch.Tensor, other: torch.Tensor) -> None:
    engine.backward(one + other)


def _one_loss_past_the_engine(engine: Any, one: torch.Tensor, other: torch.Tensor) -> None:
    del engine
    (one + other).backward()


def _two_backwards(*ways: str) -> Callable[[Any, torch.Tensor, torch.Tensor], None]:
    def backward(engine: Any, one: torch.Tensor, other: torch.Tensor) -> None:
        for way, loss, is_last in zip(ways, (one, other), (False, True), strict=True):
            engine.set_gradient_accumulation_boundary(is_last)
            engine.backward(loss) if way == "engine" else loss.backward()

    return backward


BACKWARDS = {
    "one loss": _one_loss,
    "one loss past the engine": _one_loss_past_the_engine,
    "two losses": _two_backwards("engine", "engine"),
    "two losses past the engine": _two_backwards("loss", "loss"),
    "the second past the engine": _two_backwards("engine", "loss"),
    "the first past the engine": _two_backwards("loss", "engine"),
}


@pytest.mark.parametrize("way", BACKWARDS)
def test_both_gradients_count(gpu_fraction: float, way: str) -> None:
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        for number in range(STEPS):
            with run.step(2 * number, 2 * number + 1) as batches:
                BACKWARDS[way](run.engine, *(run.engine(**batch) for batch in batches))


@pytest.mark.parametrize("way", BACKWARDS)
def test_weights_that_are_gathered(gpu_fraction: float, way: str) -> None:
    """ZeRO-3 with weights on the host makes the same steps, bit by bit."""
    states = []
    for zero in ({"stage": 2}, {"stage": 3, "offload_param": {"device": "cpu"}}):
        config = make_config(gpu_fraction=gpu_fraction, bf16=False, clipping=0.5)
        config["zero_optimization"].update(zero)
        with built(make_model("mlp"), config) as engine:
            for number in range(STEPS):
                batches = [inputs(2 * number), inputs(2 * number + 1)]
                BACKWARDS[way](engine, *(engine(**batch) for batch in batches))
                engine.step()
            states.append(engine.fp32_state_dict())
    assert_same_states(*states)


def test_a_micro_batch_of_two_forwards_before_the_last(gpu_fraction: float) -> None:
    """With step() at the boundary only, as accelerate calls it: nothing is dropped."""
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction, accumulation=2) as run:
        engine = run.engine
        for number in range(STEPS):
            numbers = [3 * number + part for part in range(3)]
            with run.step(*numbers, scale=0.5) as batches:
                engine.set_gradient_accumulation_boundary(False)
                engine.backward(engine(**batches[0]) + engine(**batches[1]))
                engine.set_gradient_accumulation_boundary(True)
                engine.backward(engine(**batches[2]))
