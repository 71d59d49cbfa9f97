"""What blocks and train_batch return: tensors in containers, and logits that are let go."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import make_batch, make_model
from torch import nn

from hytrain.errors import UnsupportedError

# -- blocks that return their tensors in containers --------------------------------------------

Wrap = Callable[[torch.Tensor], Any]


class _Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _first(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = value.value if hasattr(value, "value") else next(iter(value))
    return value


class _Block(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.inner, self.outer, self.wrap = nn.Linear(8, 16), nn.Linear(16, 8), wrap

    def forward(self, value: Any) -> Any:
        return self.wrap(self.outer(torch.tanh(self.inner(_first(value)))))


def _trained(wrap: Wrap) -> dict[str, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(wrap) for _ in range(3)))
    config = make_config(stage=3, bf16=False)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with built(model, config) as engine:
        for _ in range(3):
            engine.backward(_first(engine(torch.randn(2, 8))).square().mean())
            engine.step()
        return dict(engine.fp32_state_dict())


FOUND: dict[str, Wrap] = {
    "set": lambda tensor: {tensor},
    "frozenset": lambda tensor: frozenset([tensor]),
    "keys": lambda tensor: {tensor: 1},
    "namespace": lambda tensor: SimpleNamespace(value=[tensor]),
    "tuple of sets": lambda tensor: ({tensor},),
}


@pytest.mark.parametrize("kind", list(FOUND))
def test_tensors_that_are_found(kind: str) -> None:
    expected = _trained(lambda tensor: tensor)
    assert_same_states(_trained(FOUND[kind]), expected)


@pytest.mark.parametrize("wrap", [lambda tensor: (t for t in [tensor]), _Box, lambda t: iter([t])])
def test_tensors_that_are_not_found(wrap: Wrap) -> None:
    with pytest.raises(UnsupportedError, match=r"'2'.*returns it in a generator or an object"):
        _trained(wrap)


# -- train_batch keeps no logits through a backward --------------------------------------------

COUNT = 3


@pytest.mark.parametrize("accumulation", ["micro_batch_major", "layer_major"])
def test_logits_are_gone_when_backward_reaches_the_blocks(accumulation: str) -> None:
    model = make_model("llama")
    logits: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def after_forward(module: Any, args: Any, output: Any) -> None:
        logits.append(weakref.ref(output))

    def before_backward(module: Any, grad_output: Any) -> None:
        alive.append(sum(each() is not None for each in logits))

    head = model.get_output_embeddings()
    head.register_forward_hook(after_forward)
    model.model.norm.register_full_backward_pre_hook(before_backward)
    hytrain = {"accumulation": accumulation}
    config = make_config(bf16=False, hytrain=hytrain, gradient_accumulation_steps=COUNT)
    with built(model, config) as engine:
        batches = (make_batch("llama", number) for number in itertools.count())
        for _ in range(3):
            engine.train_batch(batches)
    assert len(logits) >= 3 * COUNT
    assert alive == [0] * 3 * COUNT
