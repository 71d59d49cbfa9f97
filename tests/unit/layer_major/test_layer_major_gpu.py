"""Layer by layer on a GPU: streams, pinned memory, and what offloading frees."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from layer_major_runs import MICRO_BATCHES, Outcome, train
from support.engines import OFFLOAD_AT_SCALE, built, make_config
from support.models import Mlp, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

MODES = [("micro_batch_major", "keep"), ("layer_major", "keep"), ("layer_major", "offload")]
TOKENS = 64


def tokens(number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randint(0, 16000, (16, TOKENS), generator=generator)
    return {"input_ids": inputs, "labels": inputs}


def _train(accumulation: str, activations: str, **options: Any) -> Outcome:
    return train(
        lambda: make_model("llama-100m"),
        tokens,
        accumulation=accumulation,
        activations=activations,
        bf16=True,
        offload=OFFLOAD_AT_SCALE,
        **options,
    )


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5, 1.0])
def test_the_same_gradients_and_losses(gpu_fraction: float) -> None:
    runs = [_train(*mode, gpu_fraction=gpu_fraction, steps=6) for mode in MODES]
    expected = runs[0]
    for run in runs[1:]:
        assert run.refusal is None
        # The embedding's gradient is summed in any order there.
        for index, gradient in run.gradients[0].items():
            theirs = expected.gradients[0][index]
            worst = float((gradient.float() - theirs.float()).abs().max())
            assert worst <= 0.02 * float(theirs.float().abs().max()), index
        assert run.losses == pytest.approx(expected.losses, rel=0.01)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_matrices_alone_give_the_same_bits(activations: str) -> None:
    run = train(Mlp, activations=activations, steps=10)
    assert run.refusal is None
    assert run.losses == train(Mlp, accumulation="micro_batch_major", steps=10).losses


def _peak_of_a_step(activations: str, micro_batches: int) -> int:
    """Of the third one, above what others hold: the first is a trial, and memory is as it stays."""
    gc.collect()  # engines of tests before are in cycles, with hundreds of MiB each
    held = torch.cuda.memory_allocated()
    config = make_config(
        gpu_fraction=0.0,
        accumulation=micro_batches,
        hytrain={"accumulation": "layer_major", "activations": activations},
        offload=OFFLOAD_AT_SCALE,
    )
    with built(make_model("llama-100m"), config) as engine:
        for step in range(3):
            batches = [tokens(step * micro_batches + number) for number in range(micro_batches)]
            given = [{name: value.cuda() for name, value in batch.items()} for batch in batches]
            torch.cuda.reset_peak_memory_stats()
            engine.train_batch(iter(given))
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held


def test_what_is_offloaded_is_not_on_the_gpu() -> None:
    micro_batches = 4 * MICRO_BATCHES
    boundary = 16 * TOKENS * 768 * 2
    peaks = [_peak_of_a_step(way, micro_batches) for way in ("keep", "offload")]
    # Of 12 layers for 12 micro-batches; the first layer's inputs and a few in flight stay.
    assert peaks[0] - peaks[1] > 0.6 * 11 * micro_batches * boundary
