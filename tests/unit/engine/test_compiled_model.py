"""torch.compile in each of its forms: the same results as without, in every ZeRO stage."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model
from support.reused_memory import ReusedMemory
from torch import nn

States = dict[str, dict[str, torch.Tensor]]


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.model.layers if hasattr(model, "model") else model.blocks)


def _train(
    kind: str,
    form: str | None,
    backend: Any,
    *,
    stage: int = 2,
    steps: int = 3,
    accumulation: int = 2,
    fraction: float = 0.5,
) -> tuple[list[float], States]:
    """Losses of each micro-batch and one of an evaluation; master weights and moments."""
    torch._dynamo.reset()
    model = make_model(kind)
    compiled = model
    if form == "wrapped":
        compiled = torch.compile(model, backend=backend)
    elif form == "in place":
        model.compile(backend=backend)
    elif form == "layers":
        for block in _blocks(model):
            block.compile(backend=backend)
    config = make_config(stage=stage, bf16=False, accumulation=accumulation, gpu_fraction=fraction)
    found: list[float] = []
    with built(compiled, config) as engine:
        if form == "engine":
            engine.compile(backend=backend)
        for number in range(steps * accumulation):
            loss = loss_of(engine(**make_batch(kind, number)))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        with torch.no_grad():
            found.append(loss_of(engine(**make_batch(kind, 0))).item())
        states = engine.fp32_state_dict()
    torch._dynamo.reset()
    return found, {name.removeprefix("_orig_mod."): state for name, state in states.items()}


def _assert_same(found: tuple[list[float], States], expected: tuple[list[float], States]) -> None:
    assert found[0] == expected[0]
    assert_same_states(found[1], expected[1])


@pytest.mark.parametrize(
    ("stage", "kind", "form"),
    [
        (1, "mlp", "wrapped"),
        (2, "borrowing", "wrapped"),
        (3, "mlp", "wrapped"),
        pytest.param(2, "llama", "layers", marks=pytest.mark.parity_full),
        (3, "mlp", "layers"),
        (2, "mlp", "in place"),
        pytest.param(2, "llama", "engine", marks=pytest.mark.parity_full),
        (3, "borrowing", "engine"),
    ],
)
def test_compiled_is_as_eager(stage: int, kind: str, form: str) -> None:
    """The toy models read a weight outside of its module: dynamo sees that, too."""
    expected = _train(kind, None, None, stage=stage)
    _assert_same(_train(kind, form, "aot_eager", stage=stage), expected)


@pytest.mark.parametrize("kind", ["mlp", "partly_used"])
@pytest.mark.parametrize("form", ["layers", "wrapped"])
def test_memory_of_graphs_is_not_kept(kind: str, form: str) -> None:
    """CUDA graphs overwrite what they returned; gradients must have been taken over by then."""
    memory = ReusedMemory()
    expected = _train(kind, None, None)
    _assert_same(_train(kind, form, memory.backend), expected)
    assert memory.overwritten > 0


def test_layers_share_one_graph() -> None:
    """What hytrain does to modules and parameters makes no layer different from the next one."""
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        graphs.append(1)
        return module.forward

    _train("mlp", "layers", backend)
    # One with gradients, one in the evaluation.
    assert len(graphs) == 2, graphs


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
def test_placements_have_the_same_bits_under_inductor() -> None:
    """Its kernels round differently from torch's own, but gradients are the same at every k."""
    expected = _train("mlp", None, None, steps=2)
    found = _train("mlp", "layers", "inductor", steps=2)
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    _assert_same(_train("mlp", "layers", "inductor", steps=2, fraction=1.0), found)
