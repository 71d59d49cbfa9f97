"""What launches over the rows of a table have in common: the kernels find their elements by it."""

from __future__ import annotations

from typing import Any

import torch

NEVER = 2**62
"""First program of rows behind the last one: they are never reached."""
VECTOR = 16
"""Bytes, and elements: with addresses and lengths that are multiples kernels move vectors."""
TRITON_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def triton_dtypes() -> dict[torch.dtype, Any]:
    """Triton's own, of the dtypes that kernels read and write.

    Triton comes with torch's CUDA builds only: called where a GPU is present.
    """
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    return {dtype: getattr(tl, name) for dtype, name in TRITON_DTYPES.items()}
