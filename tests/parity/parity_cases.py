"""The combinations that the parity tests train."""

from __future__ import annotations

from typing import Any

from support.covering import covering, every
from support.models import TRANSFORMERS
from support.parity import Case

VALUES = {
    "model": TRANSFORMERS,
    "gpu_fraction": (0.0, 0.3, 1.0),
    "clipping": ("never", "sometimes", "always"),
    "accumulation": (1, 4),
    "dtype": ("bf16", "fp32"),
    "stage": (1, 2),
}
HALVES, UNEQUAL = SHARDS = ((0.5, 0.5), (0.7, 0.3))
SHARED = {"fractions": SHARDS, **VALUES, "stage": (1, 2, 3)}

STEPS: dict[str, Any] = {"steps": 14, "observe": (1, 9)}
ONE_RANK = [Case(**values, **STEPS) for values in covering(VALUES)]
TWO_RANKS = [Case(**values, **STEPS) for values in covering(SHARED)]
FULL = [Case(**values) for values in (*every(VALUES), *every(SHARED))]
DELAYED = [
    Case("llama", 0.0, "sometimes", 1, "bf16", **STEPS),
    Case("gpt2", 0.3, "always", 1, "bf16", **STEPS),
    Case("vit", 0.0, "never", 4, "fp32", **STEPS),
    *(Case("llama", 0.3, "sometimes", 1, "bf16", fractions=each, **STEPS) for each in SHARDS),
    Case("llama", 0.3, "sometimes", 1, "bf16", **STEPS, master="split"),
    Case("llama", 0.3, "sometimes", 1, "bf16", **STEPS, master="split", late=0.4),
    Case("llama", 0.3, "always", 1, "bf16", **STEPS, master="split", late=1.0),
    Case("llama", 0.0, "off", 1, "bf16", 3, HALVES, **STEPS, master="split", offload_param=True),
]
ROUNDED = [
    Case("llama", 0.0, "sometimes", 1, "bf16", 2, **STEPS, moments="8bit"),
    Case("llama", 0.3, "never", 4, "fp32", 1, **STEPS, moments="8bit"),
    Case("gpt2", 1.0, "always", 1, "bf16", 2, **STEPS, moments="8bit"),
    Case("vit", 0.3, "off", 1, "fp32", 3, **STEPS, moments="8bit"),
    Case("llama", 0.3, "sometimes", 1, "fp32", 2, **STEPS, moments="bf16"),
    Case("gpt2", 0.0, "never", 1, "bf16", 1, **STEPS, moments="bf16"),
    Case("vit", 1.0, "always", 4, "bf16", 2, **STEPS, moments="bf16"),
]
SPLIT = [
    Case("llama", 0.0, "sometimes", 1, "bf16", 2, **STEPS, master="split"),
    Case("llama", 0.5, "always", 4, "bf16", 1, **STEPS, master="split", moments="8bit"),
    Case("vit", 0.3, "sometimes", 4, "bf16", 3, **STEPS, master="split", moments="bf16"),
    Case("llama", 0.0, "sometimes", 1, "bf16", 2, **STEPS, master="split", late=1.0),
    Case("llama", 0.0, "sometimes", 1, "bf16", 2, **STEPS, master="split", late=0.5),
    Case("llama", 0.3, "always", 4, "bf16", 1, **STEPS, master="split", moments="8bit", late=1.0),
    Case("gpt2", 1.0, "never", 1, "bf16", 2, **STEPS, master="split"),
    Case("vit", 0.3, "off", 1, "bf16", 3, **STEPS, master="split", moments="bf16"),
    Case("gpt2", 0.3, "off", 4, "bf16", 2, **STEPS, master="split", moments="8bit"),
]
DIRECT = [  # committed as gradients arrive, on both sides
    Case("llama", 0.3, "off", 1, "bf16", 2, **STEPS),
    Case("gpt2", 1.0, "off", 1, "bf16", 1, **STEPS),
    Case("vit", 0.3, "off", 4, "fp32", 2, **STEPS),
    Case("llama", 1.0, "off", 1, "bf16", 2, **STEPS, moments="8bit"),
    Case("gpt2", 1.0, "off", 1, "bf16", 2, **STEPS, master="split"),
    Case("llama", 0.3, "off", 1, "bf16", 3, **STEPS),
]
SPLIT_ON_TWO_RANKS = [
    Case("llama", 0.3, "sometimes", 1, "bf16", 2, UNEQUAL, **STEPS, master="split",
         moments="8bit"),
    Case("gpt2", 0.0, "always", 4, "bf16", 3, UNEQUAL, **STEPS, master="split"),
    Case("llama", 0.5, "sometimes", 1, "bf16", 1, UNEQUAL, **STEPS, master="split"),
    Case("gpt2", 0.0, "always", 4, "bf16", 3, UNEQUAL, **STEPS, master="split", late=0.5),
    Case("llama", 0.3, "off", 1, "bf16", 3, HALVES, **STEPS, master="split", moments="8bit",
         offload_param=True),
    Case("vit", 0.3, "sometimes", 1, "bf16", 3, UNEQUAL, **STEPS, master="split",
         offload_param=True),
    Case("vit", 0.3, "sometimes", 1, "bf16", 3, UNEQUAL, **STEPS, master="split",
         offload_param=True, late=1.0),
]  # fmt: skip
ROUNDED_ON_TWO_RANKS = [
    Case("llama", 0.3, "sometimes", 1, "bf16", 2, UNEQUAL, **STEPS, moments="8bit"),
    Case("gpt2", 0.0, "always", 4, "bf16", 3, UNEQUAL, **STEPS, moments="8bit"),
    Case("llama", 0.3, "sometimes", 1, "bf16", 3, HALVES, **STEPS, moments="8bit",
         offload_param=True),
    Case("vit", 1.0, "never", 1, "fp32", 1, HALVES, **STEPS, moments="bf16"),
    Case("llama", 0.3, "sometimes", 1, "fp32", 3, UNEQUAL, **STEPS, moments="bf16"),
]  # fmt: skip
