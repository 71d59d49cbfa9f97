"""How Adam's moments may be kept ("hytrain.moments"), and what that takes. Plain numbers, no torch.

docs/internals.md, "Moments in fewer bytes", has the formats.
"""

from __future__ import annotations

from typing import Final, Literal

MomentsName = Literal["fp32", "bf16", "8bit"]

FP32: Final = "fp32"
MOMENTS: Final[tuple[MomentsName, ...]] = ("fp32", "bf16", "8bit")

MASTER_BYTES: Final = 4
"""Of a master weight, always fp32."""
_BYTES: Final[dict[str, int]] = {"fp32": 4, "bf16": 2, "8bit": 1}
_CODE_BLOCK = 64
"""Elements that share an exponent, of one byte, where moments are 8-bit codes."""


def moment_bytes(moments: str, parameters: int) -> int:
    """Bytes of both moments of so many parameters."""
    exponents = -(-parameters // _CODE_BLOCK) if moments == "8bit" else 0
    return 2 * (_BYTES[moments] * parameters + exponents)


def state_bytes(moments: str, parameters: int) -> int:
    """Bytes of fp32 master weights and both moments, on whichever side."""
    return MASTER_BYTES * parameters + moment_bytes(moments, parameters)


def state_bytes_each(moments: str) -> float:
    """Bytes of state a parameter: 12, 8, or 6 and 1/32."""
    whole, part = divmod(state_bytes(moments, _CODE_BLOCK), _CODE_BLOCK)
    return whole + part / _CODE_BLOCK if part else whole
