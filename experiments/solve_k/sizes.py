"""The models of this experiment: offload_step's and larger ones. No torch."""

from __future__ import annotations

import dataclasses

from experiments.offload_step.sizes import SIZES, Size, size_of

LARGE = {
    # Llama 7B: part others gives it fewer or more blocks, of 0.2 B parameters each.
    "llama-7b": Size(layers=32, hidden=4096, intermediate=11008, heads=32, vocab=32000),
    # The published setting: Llama 2 cut to 30 layers.
    "llama-10b": Size(layers=30, hidden=5120, intermediate=13824, heads=40, vocab=32000),
    "llama-15b": Size(layers=33, hidden=6144, intermediate=16384, heads=48, vocab=32000),
}

MODELS = (*SIZES, *LARGE)


def size_with(model: str, layers: int | None = None) -> Size:
    """The size called `model`, if need be with another number of blocks."""
    size = LARGE[model] if model in LARGE else size_of(model)
    return size if layers is None else dataclasses.replace(size, layers=layers)


def register(model: str, layers: int | None = None) -> Size:
    """Makes a model known to offload_step's functions, which look sizes up by name.

    For measuring processes alone: it changes what the name means for everyone.
    """
    SIZES[model] = size_with(model, layers)
    return SIZES[model]


def plain_flops(num_parameters: int, batch: int, seq: int) -> float:
    """6 N D: six operations for each parameter and token, recomputation not counted."""
    return 6.0 * num_parameters * batch * seq
