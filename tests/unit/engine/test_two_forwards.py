"""Several forwards before a backward, as preference and contrastive losses have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import make_model
from support.shadow import Shadow, Twin
from training import FRACTIONS, inputs

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
    model = make_model("mlp")
    twin = Twin(model)
    with built(model, make_config(gpu_fraction=gpu_fraction, bf16=False, clipping=0.5)) as engine:
        shadow = Shadow(engine)
        for number in range(STEPS):
            batches = [inputs(2 * number), inputs(2 * number + 1)]
            expected = twin.gradients(engine, batches)
            BACKWARDS[way](engine, *(engine(**batch) for batch in batches))
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


@pytest.mark.parametrize("way", BACKWARDS)
def test_weights_that_are_gathered(gpu_fraction: float, way: str) -> None:
    """ZeRO-3 with weights on the host makes the same steps, bit by bit."""
    states = []
    for zero in ({"stage": 2}, {"stage": 3, "offload_param": {"device": "cpu"}}):
        config = make_config(gpu_fraction=gpu_fraction, bf16=False, clipping=0.5)
        config["zero_optimization"].update(zero)
        torch.manual_seed(0)
        with built(make_model("mlp"), config) as engine:
            for number in range(STEPS):
                batches = [inputs(2 * number), inputs(2 * number + 1)]
                BACKWARDS[way](engine, *(engine(**batch) for batch in batches))
                engine.step()
            states.append(engine.fp32_state_dict())
    for name, tensors in states[0].items():
        for key, value in tensors.items():
            assert torch.equal(value, states[1][name][key]), f"{key} of {name}"


def test_a_micro_batch_of_two_forwards_before_the_last(gpu_fraction: float) -> None:
    """With step() at the boundary only, as accelerate calls it: nothing is dropped."""
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False, accumulation=2)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for number in range(STEPS):
            batches = [inputs(3 * number + part) for part in range(3)]
            expected = twin.gradients(engine, batches, 0.5)
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(**batches[0]) + engine(**batches[1]))
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(**batches[2]))
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()
