"""torch.compile with CUDA graphs: recorded once, and the same bits as compiled without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
States = dict[str, dict[str, torch.Tensor]]
STEPS = 8


class Captures:
    """How many CUDA graphs were recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        original = torch.cuda.CUDAGraph.capture_begin

        def counted(*arguments: Any, **named: Any) -> None:
            self.number += 1
            original(*arguments, **named)

        monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", counted)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    yield Captures(monkeypatch)
    torch._dynamo.reset()


def _train(
    form: str,
    mode: str,
    captures: Captures,
    *,
    kind: str = "llama",
    fraction: float = 0.5,
    accumulation: int = 1,
    stage: int = 2,
) -> tuple[States, list[int]]:
    """Master weights and moments after some steps, and the graphs recorded by each step's end."""
    torch._dynamo.reset()
    model: Any = make_model(kind)
    if form == "model":
        model.compile(mode=mode)
    elif form == "layers":
        for layer in model.model.layers if kind == "llama" else model.blocks:
            layer.compile(mode=mode)
    recorded: list[int] = []
    config = make_config(stage=stage, accumulation=accumulation, gpu_fraction=fraction)
    with built(model, config) as engine:
        if form == "engine":
            engine.compile(compile_kwargs={"mode": mode})
        for number in range(STEPS * accumulation):
            loss = loss_of(engine(**make_batch(kind, number, "cuda")))
            engine.backward(loss)
            engine.step()
            if (number + 1) % accumulation == 0:
                recorded.append(captures.number)
        return engine.fp32_state_dict(), recorded


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("form", ["layers", "model", "engine"])
def test_graphs_have_the_bits_of_no_graphs(
    form: str, accumulation: int, captures: Captures
) -> None:
    expected, none = _train(form, "default", captures, accumulation=accumulation)
    assert none[-1] == 0
    states, recorded = _train(form, "reduce-overhead", captures, accumulation=accumulation)
    assert_same_states(states, expected)
    # Forward and backward of each block, in the first steps; then they are replayed.
    assert recorded[-1] >= 8
    assert recorded[-1] == recorded[STEPS // 2]


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_placements_have_the_same_bits(fraction: float, captures: Captures) -> None:
    mode = "reduce-overhead"
    expected, _ = _train("layers", mode, captures)
    states, _ = _train("layers", mode, captures, fraction=fraction)
    assert_same_states(states, expected)


def test_sharded_layers(captures: Captures) -> None:
    """ZeRO-3 gathers weights to memory that changes: the results stay right."""
    expected, _ = _train("layers", "default", captures, stage=3)
    states, _ = _train("layers", "reduce-overhead", captures, stage=3)
    assert_same_states(states, expected)


def test_gradients_that_wait_for_others(captures: Captures) -> None:
    """They are in the graph's memory until the layer's are taken over, and one never comes."""
    found = [
        _train("layers", mode, captures, kind="partly_used", accumulation=2)[0]
        for mode in ("default", "reduce-overhead")
    ]
    assert_same_states(found[1], found[0])
