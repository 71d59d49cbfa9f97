"""The dtypes of a training copy, as files and options name them."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bf16", "fp16", "fp32"]

TORCH_NAMES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The dtypes' names in ``torch``."""

ITEMSIZE: dict[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element."""
