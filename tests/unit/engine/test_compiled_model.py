"""``torch.compile(model)`` before initialize: the same results as without, in every ZeRO stage."""

from __future__ import annotations

import pytest
import torch
from support.comparisons import assert_same_bits
from support.engines import built, join_process_group, make_config
from support.models import loss_of, make_batch, make_model


@pytest.mark.parametrize(("stage", "kind"), [(1, "mlp"), (2, "borrowing"), (3, "mlp")])
def test_compiled_is_as_eager(stage: int, kind: str) -> None:
    """The toy models read a weight outside of its module: dynamo sees that, too."""
    join_process_group()
    losses: list[list[float]] = []
    states: list[dict[str, dict[str, torch.Tensor]]] = []
    for is_compiled in (False, True):
        model = make_model(kind)
        if is_compiled:
            torch._dynamo.reset()
            model = torch.compile(model, backend="aot_eager")
        config = make_config(stage=stage, bf16=False, accumulation=2, gpu_fraction=0.5)
        found: list[float] = []
        with built(model, config) as engine:
            for number in range(6):
                loss = loss_of(engine(**make_batch(kind, number)))
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            with torch.no_grad():
                found.append(loss_of(engine(**make_batch(kind, 0))).item())
            states.append(engine.fp32_state_dict())
        losses.append(found)
    assert losses[0] == losses[1]
    for name, tensors in states[1].items():
        for state, tensor in tensors.items():
            expected = states[0][name.removeprefix("_orig_mod.")][state]
            assert_same_bits(f"{state} of {name}", tensor, expected)
