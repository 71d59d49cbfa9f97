"""train_batch keeps no logits through a backward: they are the largest tensor of small models."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import make_batch, make_model

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
