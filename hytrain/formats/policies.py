"""Policies for activations between forward and backward, and the orders of micro-batches."""

from __future__ import annotations

from typing import Literal

Activations = Literal["store", "recompute", "keep", "offload"]
"""What becomes of activations between forward and backward.

"store" and "recompute": one micro-batch after another passes through the whole model; each layer
keeps all its activations, or only its input, and the rest is computed again. "keep" and "offload":
all micro-batches pass through one layer after another (layer-major); the inputs of all layers for
all samples stay on the GPU, or go to the host; the rest is computed again.
"""

ACTIVATIONS: tuple[Activations, ...] = ("store", "recompute", "keep", "offload")

LAYER_MAJOR: tuple[Activations, ...] = ("keep", "offload")

Accumulation = Literal["micro_batch_major", "layer_major"]
"""How a step's micro-batches are computed, as named in the configuration."""

ACCUMULATION_MODES: dict[Accumulation, tuple[Activations, ...]] = {
    "micro_batch_major": ("store", "recompute"),
    "layer_major": LAYER_MAJOR,
}
"""The policies of each mode. In stage 3 all ranks have the same: they use each layer together."""
