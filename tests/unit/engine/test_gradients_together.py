"""Gradients of small parameters are taken over in one launch; the result is that of one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import HIDDEN, Mlp, make_model
from support.shadow import Shadow, Twin
from torch import nn
from training import Faulty, backward, inputs, train_and_compare

from hytrain.optimizer import gradients as gradients_module
from hytrain.optimizer import layer_gradient

pytestmark = pytest.mark.timeout(60)

SIZES = pytest.mark.parametrize("small", [0, 1 << 60], ids=["one by one", "together"])


class Uneven(Mlp):
    """A block's bias is unused, another's used twice, a third's only in some steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.extra = nn.Linear(HIDDEN, HIDDEN)
        self.use_extra = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = block(x)
        x = self.blocks[1](x)
        if self.use_extra:
            x = nn.functional.linear(x, self.extra.weight)
        return self.head(x).pow(2).mean()


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gradients that each call took over."""
    found: list[int] = []
    for name in ("copy_together", "add_together"):
        real = getattr(layer_gradient, name)

        def counted(destinations: Any, sources: Any, real: Any = real) -> None:
            found.append(len(sources))
            real(destinations, sources)

        monkeypatch.setattr(layer_gradient, name, counted)
    return found


@SIZES
@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["mlp", "uneven", "repeated"])
def test_each_step_is_that_of_a_plain_model(
    monkeypatch: pytest.MonkeyPatch, small: int, gpu_fraction: float, kind: str
) -> None:
    monkeypatch.setattr(gradients_module, "_SMALL", small)
    model: Any = {"mlp": lambda: make_model("mlp"), "uneven": Uneven, "repeated": Faulty}[kind]()
    twin = Twin(model)

    def before(number: int) -> None:
        plain: Any = twin.plain
        for each in (model, plain):
            if kind == "uneven":
                each.use_extra = number % 2 == 0
            elif kind == "repeated":
                each.repeats = 2

    train_and_compare(model, gpu_fraction=gpu_fraction, before=before, twin=twin)


@SIZES
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_micro_batches_add_up(
    monkeypatch: pytest.MonkeyPatch, small: int, dtype: str | None
) -> None:
    monkeypatch.setattr(gradients_module, "_SMALL", small)
    types = {"grad_accum_dtype": dtype} if dtype else None
    config = make_config(gpu_fraction=0.5, accumulation=3, clipping=0.1, data_types=types)
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for number in range(9):
            backward(engine, number)
            shadow.step() if number % 3 == 2 else engine.step()
            # None waits from one micro-batch to the next: memory would hold it twice.
            assert not any(layer.waiting for layer in engine.optimizer.passes.collector.layers)
        shadow.check()


def test_both_ways_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[torch.Tensor]] = []
    for small in (0, 1 << 60):
        monkeypatch.setattr(gradients_module, "_SMALL", small)
        with built(Uneven(), make_config(gpu_fraction=0.5, accumulation=2)) as engine:
            for number in range(6):
                backward(engine, number)
                engine.step()
            engine.synchronize()
            found.append([p.detach().clone() for p in engine.module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_layer_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = launches(monkeypatch)
    model = make_model("mlp")
    with built(model, make_config(gpu_fraction=1.0)) as engine:
        engine(**inputs(0))  # the first forward; nothing is taken over
        backward(engine, 0)
        engine.step()
        sizes = [len(state.layout.slots) for state in engine.optimizer.layer_states]
        assert max(sizes) > 1
        assert sorted(taken) == sorted(size for size in sizes if size > 1)
